// One request's life as bars over time. `phases` is pure.

import { el } from './dom.js';
import { duration } from './format.js';

const BEGINS = { placed: 'prefill', adopted: 'decode', prompt_computed: 'decode', first_token: 'decode', waits: 'waiting' };
const NAMES = { received: 'received', waiting: 'waiting', prefill: 'prefill', decode: 'decode', closing: 'closing' };

/**
 * Bars from the router's times and the schedulers' lines: [{kind, text, from, to}], in seconds since the epoch. Of a
 * request that still runs the last one ends at `now`.
 */
export function phases(request, story, now) {
  const end = request.ended_at ?? now;
  const moments = [{ at: request.arrived_at, kind: 'received' }];
  if (request.queued_at) moments.push({ at: request.queued_at, kind: 'waiting' });
  let worker = '';
  for (const line of story) {
    const kind = BEGINS[line.kind];
    if (line.worker) worker = line.worker;
    if (kind && !(kind === 'decode' && moments.at(-1).kind === 'decode')) {
      moments.push({ at: line.at, kind, text: kind === 'waiting' ? 'again' : worker });
    } else if (line.kind === 'ended') {
      moments.push({ at: line.at, kind: 'closing' });
    }
  }
  if (!story.length && request.first_token_at) moments.push({ at: request.first_token_at, kind: 'decode' });
  return moments
    .map((moment, index) => {
      const to = Math.min(end, moments[index + 1]?.at ?? end);
      return { kind: moment.kind, text: moment.text ?? '', from: Math.min(moment.at, to), to };
    })
    .filter((bar) => bar.to > bar.from);
}

export function waterfall({ request, story, problem }, now) {
  const bars = phases(request, story, now);
  const start = request.arrived_at;
  const total = Math.max(1e-3, (request.ended_at ?? now) - start);
  const rows = bars.map((bar) => {
    const fill = el('i', { className: bar.kind });
    fill.style.setProperty('--from', `${(100 * (bar.from - start)) / total}%`);
    fill.style.setProperty('--width', `${(100 * (bar.to - bar.from)) / total}%`);
    const name = `${NAMES[bar.kind]} ${bar.text}`.trim();
    return el('li', {}, el('span', { className: 'name', textContent: name, title: name }), el('div', { className: 'track' }, fill),
      el('span', { className: 'time', textContent: duration(1000 * (bar.to - bar.from)) }));
  });
  const facts = [
    request.outcome || 'running', `${request.prompt_tokens} tokens in (${request.cached_tokens} cached)`,
    `${request.output_tokens} out`,
    request.first_token_at ? `first token after ${duration(1000 * (request.first_token_at - start))}` : null,
    request.ended_at ? `whole after ${duration(1000 * (request.ended_at - start))}` : null,
  ].filter(Boolean).join(' · ');
  return el('article', { className: 'waterfall' },
    el('h3', {}, el('code', { textContent: request.id })), el('p', { textContent: facts }), el('ol', { className: 'bars' }, ...rows),
    problem ? el('p', { className: 'hint', textContent: problem }) : null, story.length ? lines(story, start) : null);
}

function lines(story, start) {
  const rows = story.map((line) => el('tr', {}, el('td', { textContent: `+${duration(1000 * Math.max(0, line.at - start))}` }),
    el('td', { textContent: line.text })));
  return el('details', {}, el('summary', { textContent: 'What the scheduler saw and did' }),
    el('div', { className: 'wide' }, el('table', {}, el('tbody', {}, ...rows))));
}
