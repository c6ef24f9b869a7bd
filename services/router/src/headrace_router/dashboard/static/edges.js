// The lines between the boxes, with something moving along them: dots for tokens and requests, faster the more there are.
// Without motion a line's strength tells how much flows.

import { mayMove, say, svg } from './dom.js';

const SPACING = { requests: 26, control: 20, tokens: 13 };
const NARROW_PX = 760;

export class Edges {
  constructor(root, edges) {
    this.root = root;
    this.canvas = svg('svg', { class: 'edges', 'aria-hidden': 'true' });
    root.prepend(this.canvas);
    this.edges = edges.map((edge) => this.#make(edge));
    this.isRunning = false;
    new ResizeObserver(() => this.#lay()).observe(root);
    matchMedia('(prefers-reduced-motion: reduce)').addEventListener('change', () => this.#start());
    document.addEventListener('visibilitychange', () => this.#start());
  }

  /** `flows`: name -> [how much a second, label]. */
  show(flows) {
    for (const edge of this.edges) {
      const [flow, label] = flows[edge.name];
      edge.flow = flow;
      say(edge.label, flow > 0 ? label : '');
      edge.group.classList.toggle('idle', !(flow > 0));
      edge.line.style.setProperty('--strength', String(1 + Math.min(3, Math.log10(1 + flow))));
    }
    this.#lay();
    this.#start();
  }

  #make(edge) {
    const group = svg('g', { class: `edge ${edge.kind} idle` });
    const line = svg('path', { class: 'line' });
    const dots = svg('path', { class: 'flow', 'stroke-dasharray': `0 ${SPACING[edge.kind]}` });
    const label = svg('text', {});
    group.append(line, dots, label);
    this.canvas.append(group);
    return { ...edge, group, line, dots, label, flow: 0, at: 0 };
  }

  /** Positions follow the boxes, wherever the style sheet has put them. */
  #lay() {
    const origin = this.root.getBoundingClientRect();
    if (!origin.width) return;
    this.canvas.setAttribute('viewBox', `0 0 ${origin.width} ${origin.height}`);
    const isNarrow = origin.width < NARROW_PX;
    for (const edge of this.edges) {
      const [from, to] = [edge.from, edge.to].map((name) => box(this.root, name, origin));
      const path = isNarrow ? vertical(edge, from, to, origin) : horizontal(edge, from, to, origin);
      if (path.d !== edge.line.getAttribute('d')) {
        edge.line.setAttribute('d', path.d);
        edge.dots.setAttribute('d', path.d);
        edge.label.setAttribute('x', path.x);
        edge.label.setAttribute('y', path.y);
        edge.label.setAttribute('text-anchor', path.anchor ?? 'middle');
      }
    }
  }

  #start() {
    if (this.isRunning || !mayMove() || document.hidden) return;
    this.isRunning = true;
    let last = performance.now();
    const step = (now) => {
      if (!mayMove() || document.hidden) {
        this.isRunning = false;
        return;
      }
      const seconds = Math.min(0.1, (now - last) / 1000);
      last = now;
      for (const edge of this.edges) {
        if (!(edge.flow > 0)) continue;
        edge.at = (edge.at + seconds * speed(edge.flow)) % SPACING[edge.kind];
        edge.dots.setAttribute('stroke-dashoffset', String(-edge.at));
      }
      requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
  }
}

/** Pixels a second: hundreds of tokens a second would only blur, so it grows with the logarithm. */
const speed = (flow) => 14 + 22 * Math.log2(1 + flow);

function box(root, name, origin) {
  const rect = root.querySelector(`[data-box="${name}"]`).getBoundingClientRect();
  const [left, top] = [rect.left - origin.left, rect.top - origin.top];
  return { left, top, right: left + rect.width, bottom: top + rect.height, x: left + rect.width / 2, y: top + rect.height / 2 };
}

function horizontal(edge, from, to, origin) {
  if (edge.isReturn) {
    const low = origin.height - 16;
    const [x1, x2] = [from.x, to.x];
    return { d: `M${x1} ${from.bottom}C${x1} ${low + 12} ${x1 - 30} ${low} ${x1 - 60} ${low}H${x2 + 60}C${x2 + 30} ${low} ${x2} ${low + 12} ${x2} ${to.bottom}`, x: (x1 + x2) / 2, y: low - 8 };
  }
  const isUpright = from.bottom <= to.top || to.bottom <= from.top;
  if (isUpright) {
    const [y1, y2] = from.bottom <= to.top ? [from.bottom, to.top] : [from.top, to.bottom];
    const x = Math.max(from.left, to.left) + Math.min(from.right - from.left, to.right - to.left) / 2;
    return { d: `M${x} ${y1}V${y2}`, x: x + 8, y: (y1 + y2) / 2 + 4, anchor: 'start' };
  }
  const y = Math.max(from.top, to.top) + 46 + 44 * (edge.offset ?? 0);
  const [x1, x2] = from.right <= to.left ? [from.right, to.left] : [from.left, to.right];
  return { d: `M${x1} ${y}H${x2}`, x: (x1 + x2) / 2, y: y - 9 };
}

function vertical(edge, from, to, origin) {
  if (edge.isReturn) {
    const x = origin.width - 10;
    return { d: `M${from.right} ${from.y}H${x - 8}Q${x} ${from.y} ${x} ${from.y - 8}V${to.y + 8}Q${x} ${to.y} ${x - 8} ${to.y}H${to.right}`, x: from.right - 4, y: from.top - 8, anchor: 'end' };
  }
  const [y1, y2] = from.bottom <= to.top ? [from.bottom, to.top] : [from.top, to.bottom];
  const x = from.x + 56 * (edge.offset ?? 0);
  return { d: `M${x} ${y1}V${y2}`, x: x + 10, y: (y1 + y2) / 2 + 4, anchor: 'start' };
}
