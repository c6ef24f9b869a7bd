// One answer after the other, asked for by this browser while a flood runs: each piece of text is a dot when it comes, so
// that a person feels the pauses. The text itself is of no interest.

import { ask, events } from './api.js';
import { el } from './dom.js';

const MOST_DOTS = 160;
const PAUSE_MS = 300;
const WORDS = 'river water wheel stone mill field road light cloud rain'.split(' ');

export class Probe {
  constructor(root) {
    this.root = root;
  }

  async run({ model, tokens, words, signal }) {
    const tell = el('span', { className: 'waiting', textContent: 'waiting' });
    while (!signal.aborted) {
      this.root.replaceChildren(tell);
      try {
        const prompt = Array.from({ length: words }, () => WORDS[Math.floor(Math.random() * WORDS.length)]).join(' ');
        const body = { model, prompt, max_tokens: tokens, temperature: 0, ignore_eos: true, stream: true };
        const response = await ask('/v1/completions', { body, signal });
        for await (const [, data] of events(response)) {
          if (data === '[DONE]') break;
          const text = JSON.parse(data).choices?.[0]?.text;
          if (!text) continue;
          tell.remove();
          this.root.append(el('i'));
          while (this.root.childElementCount > MOST_DOTS) this.root.firstElementChild.remove();
        }
      } catch {
        // Refused or stopped: the flood's own figures say which.
      }
      if (!signal.aborted) await new Promise((done) => setTimeout(done, PAUSE_MS));
    }
    tell.remove();
  }
}
