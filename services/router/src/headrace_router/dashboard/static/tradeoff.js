// Latency over throughput: a dot for each half second of a flood, the newest strongest; earlier floods stay, faint.

import { svg } from './dom.js';
import { duration, rate } from './format.js';

const [WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT] = [480, 240, 58, 34, 12, 14];
const MOST = 600;

export class Tradeoff {
  constructor(root) {
    this.points = [];
    this.flood = 0;
    this.canvas = svg('svg', { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: 'img', 'aria-label': 'Time to first token over tokens a second' });
    root.append(this.canvas);
    this.#draw();
  }

  begin() {
    this.flood += 1;
  }

  add(tokens, ttft) {
    if (ttft === null || !tokens) return;
    this.points.push({ tokens, ttft, flood: this.flood });
    if (this.points.length > MOST) this.points.shift();
    this.#draw();
  }

  #draw() {
    const most = nice(Math.max(10, ...this.points.map((point) => point.tokens)));
    const [low, high] = [10, Math.max(100, 10 ** Math.ceil(Math.log10(Math.max(1, ...this.points.map((point) => point.ttft)))))];
    const x = (tokens) => LEFT + ((WIDTH - LEFT - RIGHT) * tokens) / most;
    const y = (ttft) => HEIGHT - BOTTOM - ((HEIGHT - BOTTOM - TOP) * Math.log(Math.max(ttft, low) / low)) / Math.log(high / low);
    const parts = [];
    for (let tick = low; tick <= high; tick *= 10) {
      parts.push(svg('line', { class: 'grid', x1: LEFT, x2: WIDTH - RIGHT, y1: y(tick), y2: y(tick) }));
      parts.push(text(duration(tick), LEFT - 8, y(tick) + 4, 'end'));
    }
    for (const share of [0, 0.5, 1]) parts.push(text(rate(share * most), x(share * most), HEIGHT - BOTTOM + 16, share === 1 ? 'end' : 'middle'));
    parts.push(text('tokens/s', (LEFT + WIDTH - RIGHT) / 2 + 60, HEIGHT - 4, 'middle'));
    this.points.forEach((point, index) => {
      const isNew = point.flood === this.flood;
      const age = this.points.length - 1 - index;
      const opacity = isNew ? Math.max(0.35, 1 - age / 40) : 0.15;
      parts.push(svg('circle', { class: isNew ? 'point' : 'point old', cx: x(point.tokens), cy: y(point.ttft), r: age === 0 ? 6 : 3.5, opacity }));
    });
    this.canvas.replaceChildren(...parts);
  }
}

function text(content, x, y, anchor) {
  const made = svg('text', { x, y, 'text-anchor': anchor });
  made.textContent = content;
  return made;
}

function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= value);
}
