// The router's interface for this page. The key stays in this tab.

const KEY = 'headrace-key';
const OWN = { 'headrace-dashboard': '1' };

export class NeedsKey extends Error {}
export class Refused extends Error {}

export const setKey = (key) => sessionStorage.setItem(KEY, key);

function headers(more = {}) {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...OWN, authorization: `Bearer ${key}`, ...more } : { ...OWN, ...more };
}

/** A response that is fine; else NeedsKey or Refused. `body`, if any, is sent as JSON. */
export async function ask(path, { body, signal } = {}) {
  const options = { headers: headers(), signal, cache: 'no-store' };
  if (body !== undefined) {
    options.method = 'POST';
    options.headers = headers({ 'content-type': 'application/json' });
    options.body = JSON.stringify(body);
  }
  const response = await fetch(path, options);
  if (response.ok) return response;
  let message = `HTTP ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // No JSON: the status says enough.
  }
  throw response.status === 401 ? new NeedsKey(message) : new Refused(message);
}

export const askJson = async (path) => (await ask(path)).json();

/** Server-sent events of a response, as [name, data]. EventSource cannot send a key. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split('\n\n');
      rest = blocks.pop();
      for (const block of blocks) {
        const event = parse(block);
        if (event) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parse(block) {
  let name = 'message';
  let data = '';
  for (const line of block.split('\n')) {
    if (line.startsWith('event:')) name = line.slice(6).trim();
    else if (line.startsWith('data:')) data += line.slice(5).trim();
  }
  return data ? [name, data] : null;
}
