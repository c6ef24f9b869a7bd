// The system: a box for each part, and what flows between them.

import { el, figures, say } from './dom.js';
import { Edges } from './edges.js';
import { NONE, count, duration, plural, rate, shortId } from './format.js';
import { Workers } from './workers.js';

const DOTS = 36;

const BOXES = {
  client: ['Clients', [['open', 'answers open'], ['arrivals', 'requests/s']]],
  router: ['Router', [['ttft', 'TTFT p50'], ['ttft99', 'TTFT p99']]],
  queue: ['Queue', [['waiting', 'waiting'], ['taken', 'taken, not done']]],
  scheduler: ['Scheduler', [['window', 'in its window'], ['running', 'placed'], ['oldest', 'oldest waits']]],
  autoscaler: ['Autoscaler', [['ready', 'ready'], ['desired', 'wanted'], ['coming', 'coming']]],
  overflow: ['Overflow model', [['sent', 'sent there']]],
};

export class Diagram {
  constructor(root) {
    this.boxes = {};
    for (const [name, [title, names]] of Object.entries(BOXES)) this.boxes[name] = makeBox(root, name, title, names);
    this.dots = el('div', { className: 'dots', 'aria-hidden': 'true' });
    this.dots.append(...Array.from({ length: DOTS }, () => el('i')));
    this.boxes.queue.box.append(this.dots);
    this.workers = new Workers(root);
    this.edges = new Edges(root, [
      { name: 'in', from: 'client', to: 'router', kind: 'requests' },
      { name: 'queued', from: 'router', to: 'queue', kind: 'requests' },
      { name: 'taken', from: 'queue', to: 'scheduler', kind: 'requests' },
      { name: 'grants', from: 'scheduler', to: 'workers', kind: 'control' },
      { name: 'tokens', from: 'workers', to: 'router', kind: 'tokens', isReturn: true },
      { name: 'out', from: 'router', to: 'client', kind: 'tokens', offset: 1 },
      { name: 'scale', from: 'autoscaler', to: 'workers', kind: 'control' },
      { name: 'spill', from: 'router', to: 'overflow', kind: 'requests' },
    ]);
  }

  /** Shows a frame; `before` is the one of a second ago, if it is known. */
  show(frame, before) {
    const { totals } = frame;
    const arrivals = sum(frame.routers, 'requests_per_s');
    const { client, router, queue, scheduler } = this.boxes;
    client.set('open', count(totals.in_flight));
    client.set('arrivals', rate(arrivals));
    router.set('ttft', duration(totals.ttft_p50_ms));
    router.set('ttft99', duration(totals.ttft_p99_ms));
    router.note(frame.routers.length ? named(frame.routers, 'router') : 'none is heard', frame.routers);
    const waiting = frame.queues.every((each) => each.waiting !== null) ? sum(frame.queues, 'waiting') : null;
    queue.set('waiting', count(waiting));
    queue.set('taken', count(waiting === null ? null : sum(frame.queues, 'taken')));
    queue.note(waiting === null ? 'the broker does not answer' : plural(frame.queues.length, 'model'));
    this.#fill(totals.queue ?? 0);
    scheduler.set('window', count(sum(frame.schedulers, 'waiting')));
    scheduler.set('running', count(sum(frame.schedulers, 'running')));
    scheduler.set('oldest', duration(1000 * Math.max(0, ...frame.schedulers.map((each) => each.oldest_wait_s))));
    scheduler.note(frame.schedulers.length ? named(frame.schedulers, 'scheduler') : 'none is heard', frame.schedulers);
    this.#scaling(frame);
    const spilled = this.#overflow(frame, before);
    this.workers.show(frame);
    this.edges.show({
      in: [arrivals, ''],
      queued: [arrivals, ''],
      taken: [arrivals, ''],
      grants: [totals.running ? Math.max(arrivals, 0.5) : 0, 'credit'],
      tokens: [totals.tokens_per_s, `${rate(totals.tokens_per_s)} tokens/s`],
      out: [totals.tokens_per_s, ''],
      scale: [totals.starting + totals.draining, ''],
      spill: [spilled, ''],
    });
  }

  #scaling(frame) {
    const { autoscaler } = this.boxes;
    const leader = frame.autoscalers.find((each) => each.is_leader && each.models.length);
    const { ready, starting, parked } = frame.totals;
    autoscaler.set('ready', count(ready));
    autoscaler.set('desired', count(frame.totals.desired));
    const soon = (leader?.models ?? []).map((model) => model.coming_in_s).filter((each) => typeof each === 'number');
    const due = soon.length ? ` in ${duration(1000 * Math.min(...soon))}` : '';
    autoscaler.set('coming', starting ? `${count(starting)}${due}` : '0');
    const sleeping = parked ? `, ${count(parked)} parked` : '';
    if (!frame.autoscalers.length) autoscaler.note('none is heard');
    else autoscaler.note((leader ? shortId(leader.id) : 'nothing to scale yet') + sleeping);
    autoscaler.box.dataset.state = frame.autoscalers.length ? 'ready' : 'absent';
  }

  #overflow(frame, before) {
    const { overflow } = this.boxes;
    overflow.box.dataset.state = frame.overflows.length ? 'ready' : 'absent';
    overflow.note(frame.overflows.map((each) => each.model).join(', ') || 'none is used');
    const sent = sum(frame.overflows, 'num_requests');
    overflow.set('sent', frame.overflows.length ? count(sent) : NONE);
    return before ? Math.max(0, sent - sum(before.overflows, 'num_requests')) : 0;
  }

  /** A dot a waiting request, as far as there is room. */
  #fill(waiting) {
    [...this.dots.children].forEach((dot, index) => dot.classList.toggle('on', index < waiting));
    this.dots.classList.toggle('full', waiting > DOTS);
  }
}

function makeBox(root, name, title, names) {
  const list = el('dl');
  const values = figures(list, names);
  const note = el('p', { className: 'note' });
  const box = el('section', { className: 'box', tabIndex: 0, 'aria-label': title }, el('h3', { textContent: title }), list, note);
  box.dataset.box = name;
  root.append(box);
  return {
    box,
    set: values.set,
    note(text, services = []) {
      say(note, text);
      const isWell = services.every((each) => ['ready', 'running'].includes(each.state));
      box.dataset.state = isWell ? 'ready' : 'troubled';
      box.title = services.map((each) => `${each.id}: ${each.state}`).join('\n');
    },
  };
}

const sum = (items, key) => items.reduce((total, item) => total + (item[key] ?? 0), 0);

const named = (services, noun) => (services.length === 1 ? shortId(services[0].id) : plural(services.length, noun));
