// Moves through the last fifteen minutes: "replay the flow".

import { $, say } from './dom.js';
import { clock } from './format.js';

const STEP_MS = 125;

export class Scrubber {
  /** `show(frame, before)` draws a moment; `mark(at)` is told which one, or null for now. */
  constructor(store, show, mark) {
    this.store = store;
    this.show = show;
    this.mark = mark;
    this.key = null;
    this.timer = null;
    this.position = 0;
    $('at').addEventListener('input', () => this.pick(Number($('at').value)));
    $('play').addEventListener('click', () => (this.timer ? this.#pause() : this.#play()));
    $('live').addEventListener('click', () => this.goLive());
  }

  get isLive() {
    return this.key === null;
  }

  /** After each new frame: the track has grown, or has lost its oldest moment. */
  update() {
    const { columns, length } = this.store;
    const slider = $('at');
    slider.max = String(Math.max(0, length - 1));
    if (this.isLive) {
      slider.value = slider.max;
      say($('shown'), 'now');
    } else {
      const index = columns.key.indexOf(this.key);
      slider.value = String(Math.max(0, index));
      this.position = Math.max(0, index);
    }
  }

  /** Shows the moment at an index of the columns, and stays there. */
  async pick(index) {
    this.#pause();
    await this.#go(index);
  }

  goLive() {
    this.#pause();
    this.key = null;
    this.mark(null);
    $('live').disabled = true;
    document.body.classList.remove('past');
    this.update();
    if (this.store.latest) this.show(this.store.latest, null);
  }

  #play() {
    if (!this.store.length) return;
    const isAtEnd = this.isLive || this.position >= this.store.length - 1;
    this.position = isAtEnd ? 0 : this.position;
    say($('play'), 'Pause');
    let isBusy = false;
    const step = async () => {
      if (isBusy) return;
      isBusy = true;
      try {
        this.position += (Number($('speed').value) * STEP_MS) / 1000;
        if (this.position >= this.store.length - 1) this.goLive();
        else await this.#go(Math.floor(this.position));
      } finally {
        isBusy = false;
      }
    };
    this.timer = setInterval(step, STEP_MS);
    return step();
  }

  #pause() {
    clearInterval(this.timer);
    this.timer = null;
    say($('play'), 'Replay');
  }

  async #go(index) {
    const { columns } = this.store;
    const at = columns.at[index];
    if (at === undefined) return;
    const key = columns.key[index];
    const isSame = key === this.key;
    this.key = key;
    $('live').disabled = false;
    document.body.classList.add('past');
    $('at').value = String(index);
    say($('shown'), clock(at));
    this.mark(at);
    if (isSame) return;
    let frame = null;
    try {
      frame = await this.store.frameAt(index);
    } catch {
      say($('shown'), `${clock(at)}: the router does not answer`);
      return;
    }
    if (this.key !== key) return;
    if (frame) this.show(frame, null);
    else say($('shown'), `${clock(at)}: only the plots are known`);
  }
}
