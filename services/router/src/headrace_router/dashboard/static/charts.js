// Six plots of the last fifteen minutes. A click shows the system as it was then.

import uPlot from './vendor/uplot-1.6.32.esm.js';
import { el } from './dom.js';
import { count, duration, percent, rate } from './format.js';
import { KEPT_S } from './store.js';

const HEIGHT = 150;
const PLOTS = [
  { title: 'Requests waiting', unit: 'requests', lines: [['queue', 'waiting', 1]], show: count, least: 5 },
  { title: 'Time to first token', unit: 'ms', lines: [['ttft_p50_ms', 'p50', 1], ['ttft_p99_ms', 'p99', 2]], show: duration, least: 20 },
  { title: 'Tokens', unit: 'tokens/s', lines: [['tokens_per_s', 'decoded', 1], ['prefill_per_s', 'prefilled', 3]], show: rate, least: 10 },
  { title: 'Batch occupancy', unit: 'of the places', lines: [['batch', 'batch', 1]], show: percent, most: 1 },
  { title: 'KV blocks held', unit: 'of all', lines: [['kv', 'KV', 1]], show: percent, most: 1 },
  { title: 'Workers', unit: 'replicas', lines: [['ready', 'ready', 1], ['desired', 'wanted', 2], ['starting', 'starting', 3]], show: count, least: 2, isStep: true },
];

export class Charts {
  /** `pick` is called with an index of the columns. */
  constructor(root, store, pick) {
    this.store = store;
    this.root = root;
    this.shownAt = null;
    this.pick = pick;
    this.plots = [];
    this.#build();
    new ResizeObserver(() => this.#resize()).observe(root);
  }

  /** Colours are read when a plot is made. */
  restyle() {
    this.plots.forEach((each) => each.plot.destroy());
    this.root.replaceChildren();
    this.plots = [];
    this.#build();
  }

  draw() {
    const { columns } = this.store;
    const end = columns.at.at(-1) ?? Date.now() / 1000;
    for (const { plot, lines } of this.plots) {
      plot.setData([columns.at, ...lines.map(([name]) => columns[name])], false);
      plot.setScale('x', { min: Math.max(end - KEPT_S, columns.at[0] ?? end) - 1, max: end });
    }
  }

  /** The moment that the diagram shows; null while it is now. */
  mark(at) {
    this.shownAt = at;
    this.plots.forEach((each) => each.plot.redraw(false));
  }

  #build() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    for (const spec of PLOTS) {
      const holder = el('div', { className: 'chart' });
      const legend = el('span', { className: 'keys' },
        ...spec.lines.map(([, label, series]) => el('span', { className: `key s${series}`, textContent: label })));
      const heading = el('figcaption', {}, el('b', { textContent: spec.title }), ` ${spec.unit} `, legend);
      this.root.append(el('figure', {}, heading, holder));
      const plot = new uPlot(this.#options(spec, colour, holder), [[], ...spec.lines.map(() => [])], holder);
      holder.querySelector('.u-over').addEventListener('click', () => {
        if (plot.cursor.idx !== null && plot.cursor.idx !== undefined) this.pick(plot.cursor.idx);
      });
      this.plots.push({ plot, holder, lines: spec.lines });
    }
    this.draw();
  }

  #options(spec, colour, holder) {
    const axis = { stroke: colour('--soft'), grid: { stroke: colour('--line'), width: 1 }, ticks: { show: false }, font: '11px system-ui' };
    return {
      width: Math.max(200, holder.clientWidth), height: HEIGHT, legend: { show: false }, padding: [8, 8, 0, 0],
      cursor: { sync: { key: 'time' }, drag: { x: false, y: false }, points: { size: 6 } },
      scales: { x: { time: true }, y: { range: (_, low, high) => [0, spec.most ?? Math.max(spec.least, 1.1 * (high ?? 0))] } },
      axes: [{ ...axis, space: 70, size: 26, values: '{HH}:{mm}:{ss}' }, { ...axis, size: 54, space: 34, values: (_, ticks) => ticks.map((tick) => spec.show(tick)) }],
      series: [{}, ...spec.lines.map(([, , series]) => ({
        stroke: colour(`--s${series}`), width: 1.6, points: { show: false }, spanGaps: false,
        fill: spec.lines.length === 1 ? colour('--wash') : undefined,
        paths: spec.isStep ? uPlot.paths.stepped({ align: 1 }) : undefined,
      }))],
      hooks: { draw: [(plot) => this.#drawMark(plot, colour('--ink'))], setCursor: [(plot) => tell(plot, spec, holder)] },
    };
  }

  #drawMark(plot, ink) {
    if (this.shownAt === null) return;
    const x = plot.valToPos(this.shownAt, 'x', true);
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = ink;
    ctx.lineWidth = devicePixelRatio;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.restore();
  }

  #resize() {
    for (const { plot, holder } of this.plots) {
      if (holder.clientWidth && holder.clientWidth !== plot.width) plot.setSize({ width: holder.clientWidth, height: HEIGHT });
    }
  }
}

/** What the pointer is over, as a tooltip. */
function tell(plot, spec, holder) {
  const { idx } = plot.cursor;
  if (idx === null || idx === undefined) {
    holder.removeAttribute('data-tip');
    return;
  }
  holder.dataset.tip = spec.lines.map(([, label], line) => `${label} ${spec.show(plot.data[line + 1][idx])}`).join('   ');
}
