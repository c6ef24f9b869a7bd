// Recent requests, and the life of one of them.

import { NeedsKey, askJson } from './api.js';
import { $, el } from './dom.js';
import { clock, duration } from './format.js';
import { waterfall } from './waterfall.js';

export class Inspector {
  constructor() {
    this.shown = '';
    $('refresh').addEventListener('click', () => this.refresh());
    $('find').addEventListener('submit', (event) => {
      event.preventDefault();
      const id = $('find-id').value.trim();
      if (id) this.open(id);
    });
  }

  async refresh() {
    try {
      const { requests } = await askJson('/dashboard/api/requests');
      $('request-list').replaceChildren(requests.length ? this.#table(requests) : el('p', { className: 'hint', textContent: 'None yet: ask something, or start a flood.' }));
    } catch (error) {
      if (!(error instanceof NeedsKey)) $('request-list').replaceChildren(el('p', { className: 'hint', textContent: error.message }));
    }
  }

  async open(id) {
    this.shown = id;
    $('story').replaceChildren(el('p', { className: 'hint', textContent: 'The scheduler is asked; it replays its recording …' }));
    try {
      const told = await askJson(`/dashboard/api/requests/${encodeURIComponent(id)}`);
      if (this.shown === id) $('story').replaceChildren(waterfall(told, Date.now() / 1000));
    } catch (error) {
      if (this.shown === id) $('story').replaceChildren(el('p', { className: 'hint', textContent: error.message }));
    }
  }

  #table(requests) {
    const head = el('tr', {}, ...['when', 'request', 'first token', 'whole', 'tokens', 'outcome'].map((text) => el('th', { scope: 'col', textContent: text })));
    const rows = requests.map((request) => {
      const button = el('button', { type: 'button', className: 'link', 'aria-label': `Request ${request.id}` }, `…${request.id.slice(-8)}`);
      button.addEventListener('click', () => this.open(request.id));
      const since = (at) => (at ? duration(1000 * (at - request.arrived_at)) : '–');
      return el('tr', {}, el('td', { textContent: clock(request.arrived_at) }), el('td', {}, button), el('td', { textContent: since(request.first_token_at) }),
        el('td', { textContent: since(request.ended_at) }), el('td', { textContent: request.outcome ? `${request.prompt_tokens} → ${request.output_tokens}` : '–' }),
        el('td', { textContent: request.outcome || 'running' }));
    });
    return el('table', {}, el('thead', {}, head), el('tbody', {}, ...rows));
  }
}
