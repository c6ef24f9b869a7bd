// The workers, each with its KV blocks filling.

import { el, say } from './dom.js';
import { count, plural, rate, shortId } from './format.js';

const COMPACT_ABOVE = 6;

export class Workers {
  constructor(root) {
    this.note = el('p', { className: 'note' });
    this.list = el('ul', { className: 'workers' });
    this.box = el('section', { className: 'box', tabIndex: 0, 'aria-label': 'Workers' },
      el('h3', { textContent: 'Workers' }), this.list, this.note);
    this.box.dataset.box = 'workers';
    root.append(this.box);
    this.cards = new Map();
  }

  show(frame) {
    const seen = new Set();
    for (const worker of frame.workers) {
      seen.add(worker.id);
      if (!this.cards.has(worker.id)) this.#add(worker.id);
      this.cards.get(worker.id).show(worker);
    }
    for (const [id, card] of this.cards) {
      if (!seen.has(id)) {
        card.root.remove();
        this.cards.delete(id);
      }
    }
    this.list.classList.toggle('compact', frame.workers.length > COMPACT_ABOVE);
    const more = frame.num_workers - frame.workers.length;
    const each = more > 0 ? `, ${count(more)} more not shown` : '';
    say(this.note, frame.num_workers ? plural(frame.num_workers, 'worker') + each : 'none is running');
    this.box.dataset.state = frame.totals.ready ? 'ready' : 'troubled';
  }

  #add(id) {
    const card = makeCard(id);
    this.cards.set(id, card);
    this.list.append(card.root);
  }
}

function makeCard(id) {
  const state = el('span', { className: 'state' });
  const speed = el('span', { className: 'speed' });
  const held = el('i');
  const blocks = el('div', { className: 'kv', 'aria-hidden': 'true' }, held);
  const kv = el('span', { className: 'figure' });
  const batch = el('span', { className: 'figure' });
  const root = el('li', { className: 'worker', title: id },
    el('p', {}, el('b', { textContent: shortId(id) }), state, speed), blocks, el('p', { className: 'legend' }, kv, batch));
  return {
    root,
    show(worker) {
      root.dataset.state = worker.state;
      say(state, worker.state);
      say(speed, worker.state === 'ready' ? `${rate(worker.tokens_per_s)} tokens/s` : '');
      const share = worker.blocks ? worker.blocks_held / worker.blocks : 0;
      held.style.setProperty('--held', `${100 * share}%`);
      held.classList.toggle('high', share > 0.9);
      say(kv, `${count(worker.blocks_held)} of ${count(worker.blocks)} KV blocks`);
      const stalled = worker.stalled ? `, ${count(worker.stalled)} stalled` : '';
      say(batch, `batch ${count(worker.running)} of ${count(worker.max_sequences)}${stalled}`);
    },
  };
}
