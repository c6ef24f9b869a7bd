// The live page: a connection, a store, and views of it.

import { Charts } from './charts.js';
import { Diagram } from './diagram.js';
import { $, figures, say } from './dom.js';
import { FloodPanel } from './floodpanel.js';
import { clock, count, duration, percent, rate } from './format.js';
import { Inspector } from './inspector.js';
import { askForKey } from './keydialog.js';
import { Scrubber } from './scrubber.js';
import { Store } from './store.js';
import { follow } from './stream.js';
import { setUpTheme } from './theme.js';

const REFRESH_MS = 5000;

const store = new Store();
let charts = null;
setUpTheme(() => charts?.restyle());
const totals = figures($('totals'), [
  ['queue', 'waiting'], ['in_flight', 'open'], ['ttft', 'TTFT p50'], ['ttft99', 'TTFT p99'], ['tokens', 'tokens/s'],
  ['batch', 'batch'], ['kv', 'KV held'], ['ready', 'workers ready'],
]);
const diagram = new Diagram($('diagram'));
const scrubber = new Scrubber(store, show, (at) => charts.mark(at));
charts = new Charts($('charts'), store, (index) => scrubber.pick(index));
const inspector = new Inspector();
new FloodPanel(() => store.latest?.queues[0]?.model ?? '');

function show(frame, before) {
  const figure = frame.totals;
  totals.set('queue', count(figure.queue));
  totals.set('in_flight', count(figure.in_flight));
  totals.set('ttft', duration(figure.ttft_p50_ms));
  totals.set('ttft99', duration(figure.ttft_p99_ms));
  totals.set('tokens', rate(figure.tokens_per_s));
  totals.set('batch', percent(figure.batch));
  totals.set('kv', percent(figure.kv));
  totals.set('ready', count(figure.ready));
  say($('clock'), clock(frame.at));
  diagram.show(frame, before);
}

function onPast(past) {
  store.onPast(past);
  charts.draw();
  scrubber.update();
  inspector.refresh();
}

function onFrame(frame) {
  const before = store.latest;
  store.onFrame(frame);
  if (scrubber.isLive) show(frame, before);
  charts.draw();
  scrubber.update();
}

function onState(state) {
  $('link').dataset.state = state;
  say($('link'), { connecting: 'connecting', live: 'live', reconnecting: 'reconnecting', locked: 'key wanted' }[state]);
}

setInterval(() => {
  // A list that is being read with the keyboard must not change under it.
  if (!document.hidden && !$('request-list').contains(document.activeElement)) inspector.refresh();
}, REFRESH_MS);

follow({ past: onPast, frame: onFrame, state: onState, key: askForKey });
