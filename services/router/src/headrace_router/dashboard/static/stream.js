// The connection to the router: opened again whenever it ends, for as long as the page is open.

import { NeedsKey, ask, events } from './api.js';

const LEAST_MS = 500;
const MOST_MS = 5000;
const SILENT_MS = 5000;

/** Never returns. `on`: past(data), frame(data), state(name), key(message) -> a promise of a key's having been given. */
export async function follow(on) {
  let wait = LEAST_MS;
  for (;;) {
    const watch = new AbortController();
    let timer = setTimeout(() => watch.abort(), SILENT_MS);
    try {
      on.state('connecting');
      const response = await ask('/dashboard/api/live', { signal: watch.signal });
      for await (const [name, data] of events(response)) {
        clearTimeout(timer);
        timer = setTimeout(() => watch.abort(), SILENT_MS);
        wait = LEAST_MS;
        on.state('live');
        on[name]?.(JSON.parse(data));
      }
    } catch (error) {
      if (error instanceof NeedsKey) {
        on.state('locked');
        await on.key(error.message);
        continue;
      }
      // Any other failure looks the same to a person: the router is not there now.
    } finally {
      clearTimeout(timer);
    }
    on.state('reconnecting');
    await new Promise((done) => setTimeout(done, wait * (0.75 + Math.random() / 2)));
    wait = Math.min(MOST_MS, 2 * wait);
  }
}
