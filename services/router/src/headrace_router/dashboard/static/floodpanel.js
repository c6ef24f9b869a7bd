// Load at a chosen rate, and what it feels like.

import { Refused, ask, events } from './api.js';
import { $, figures, say } from './dom.js';
import { count, duration, rate } from './format.js';
import { Probe } from './probe.js';
import { Tradeoff } from './tradeoff.js';

/** The slider is logarithmic: ten steps double the rate. */
const rateOf = (position) => Number((2 ** (position / 10)).toPrecision(2));

export class FloodPanel {
  /** `model()` names the model to ask. */
  constructor(model) {
    this.model = model;
    this.abort = null;
    this.probe = new Probe($('probe'));
    this.tradeoff = new Tradeoff($('tradeoff'));
    this.figures = figures($('flood-figures'), [
      ['due', 'sent'], ['open', 'open'], ['complete', 'complete'], ['tokens', 'tokens/s'], ['p50', 'TTFT p50'], ['p99', 'TTFT p99'], ['errors', 'errors'],
    ]);
    for (const id of ['rate', 'tokens', 'words', 'seconds']) $(id).addEventListener('input', () => this.#showPlan());
    $('flood-form').addEventListener('submit', (event) => {
      event.preventDefault();
      this.run();
    });
    $('stop').addEventListener('click', () => this.abort?.abort());
    this.#showPlan();
  }

  async run() {
    if (this.abort) return;
    this.abort = new AbortController();
    this.#setRunning(true);
    this.tradeoff.begin();
    const plan = this.#plan();
    const { signal } = this.abort;
    let ending = 'over';
    try {
      const response = await ask('/dashboard/api/flood', { body: plan, signal });
      this.probe.run({ model: this.model(), tokens: plan.output_tokens, words: plan.prompt_words, signal });
      for await (const [name, data] of events(response)) {
        if (name === 'done') break;
        this.#show(JSON.parse(data));
      }
    } catch (error) {
      ending = signal.aborted ? 'stopped' : error instanceof Refused ? error.message : 'the router does not answer';
    }
    this.abort.abort();
    this.abort = null;
    this.#setRunning(false);
    say($('flood-state'), ending);
  }

  #plan() {
    return {
      rate: rateOf(Number($('rate').value)), duration_s: Number($('seconds').value), model: this.model(),
      prompt_words: Number($('words').value), output_tokens: Number($('tokens').value),
    };
  }

  #showPlan() {
    const plan = this.#plan();
    say($('rate-shown'), rate(plan.rate));
    $('rate').setAttribute('aria-valuetext', `${rate(plan.rate)} requests a second`);
    say($('tokens-shown'), count(plan.output_tokens));
    say($('words-shown'), count(plan.prompt_words));
    say($('seconds-shown'), count(plan.duration_s));
  }

  #show(told) {
    const set = this.figures.set;
    const errors = Object.entries(told.errors).map(([name, number]) => `${number} × ${name}`);
    if (told.left_out) errors.push(`${told.left_out} left out`);
    set('due', count(told.due));
    set('open', count(told.open));
    set('complete', count(told.complete));
    set('tokens', rate(told.tokens_per_s));
    set('p50', duration(told.ttft_p50_ms));
    set('p99', duration(told.ttft_p99_ms));
    set('errors', errors.join(', ') || '0');
    say($('flood-state'), `${duration(1000 * told.at)} of ${$('seconds').value} s`);
    this.tradeoff.add(told.tokens_per_s, told.ttft_p50_ms);
  }

  #setRunning(isRunning) {
    $('start').disabled = isRunning;
    $('stop').disabled = !isRunning;
    if (isRunning) say($('flood-state'), 'starting');
  }
}
