// What has been seen: columns for the plots, frames for the replay. The router keeps fifteen minutes; so does this, and
// what a router forgot when it was restarted is kept here.

import { askJson } from './api.js';

export const KEPT_S = 900;
const CHUNK = 60;
const FIGURES = ['queue', 'in_flight', 'running', 'tokens_per_s', 'prefill_per_s', 'ttft_p50_ms', 'ttft_p99_ms',
  'batch', 'kv', 'ready', 'starting', 'parked', 'draining', 'desired'];

export class Store {
  constructor() {
    this.columns = { key: [], at: [], ...Object.fromEntries(FIGURES.map((name) => [name, []])) };
    this.boot = '';
    this.frames = new Map();
    this.latest = null;
  }

  get length() {
    return this.columns.at.length;
  }

  /** The first event of a connection: what the router remembers. */
  onPast({ boot, columns }) {
    const kept = boot === this.boot ? 0 : this.#before(columns.at[0] ?? Infinity);
    this.boot = boot;
    for (const name of ['key', 'at', ...FIGURES]) {
      const own = this.columns[name].slice(0, kept);
      const told = name === 'key' ? columns.seq.map((seq) => `${boot}/${seq}`) : columns[name];
      this.columns[name] = own.concat(told);
    }
    this.#trim();
  }

  onFrame(frame) {
    this.latest = frame;
    const key = `${this.boot}/${frame.seq}`;
    this.frames.set(key, frame);
    if (this.columns.key.at(-1) === key) return;
    this.columns.key.push(key);
    this.columns.at.push(frame.at);
    for (const name of FIGURES) this.columns[name].push(frame.totals[name]);
    this.#trim();
  }

  /** The frame at an index of the columns; null if nobody has it any more. */
  async frameAt(index) {
    const key = this.columns.key[index];
    if (!key) return null;
    if (!this.frames.has(key) && key.startsWith(`${this.boot}/`)) {
      const first = Number(key.slice(this.boot.length + 1));
      const boot = this.boot;
      const path = `/dashboard/api/frames?first=${Math.max(1, first - CHUNK / 2)}&last=${first + CHUNK}`;
      for (const frame of await askJson(path)) this.frames.set(`${boot}/${frame.seq}`, frame);
    }
    return this.frames.get(key) ?? null;
  }

  #before(at) {
    const index = this.columns.at.findIndex((each) => each >= at);
    return index < 0 ? this.length : index;
  }

  #trim() {
    const oldest = (this.columns.at.at(-1) ?? 0) - KEPT_S;
    const surplus = this.#before(oldest);
    if (!surplus) return;
    for (const key of this.columns.key.slice(0, surplus)) this.frames.delete(key);
    for (const name of Object.keys(this.columns)) this.columns[name].splice(0, surplus);
  }
}
