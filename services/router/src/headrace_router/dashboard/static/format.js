// Numbers as people read them, with their units.

const whole = new Intl.NumberFormat('en', { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat('en', { maximumFractionDigits: 1 });
const timeOfDay = new Intl.DateTimeFormat([], { hour: '2-digit', minute: '2-digit', second: '2-digit', hour12: false });

export const NONE = '–';

export const count = (value) => (value === null || value === undefined ? NONE : whole.format(value));

export function rate(value) {
  if (value === null || value === undefined) return NONE;
  return value >= 100 ? whole.format(value) : tenth.format(value);
}

export const percent = (share) => (share === null || share === undefined ? NONE : `${tenth.format(100 * share)} %`);

export function duration(ms) {
  if (ms === null || ms === undefined) return NONE;
  if (ms < 10) return `${tenth.format(ms)} ms`;
  if (ms < 1000) return `${whole.format(ms)} ms`;
  return `${tenth.format(ms / 1000)} s`;
}

/** Of seconds since the epoch. */
export const clock = (at) => timeOfDay.format(new Date(1000 * at));

/** Ids are `worker-1a2b3c4d`: people tell them apart by their ends. */
export const shortId = (id) => (id.length > 18 ? `${id.slice(0, 6)}…${id.slice(-6)}` : id);

export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? '' : 's'}`;
