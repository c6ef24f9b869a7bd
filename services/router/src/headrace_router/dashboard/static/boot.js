// Starts the page, and tries again where one of its files did not come: a router that is being restarted must not leave a
// dead page behind.

const TRIES = 'headrace-tries';
const MOST = 10;
const WAIT_MS = 1500;

const tries = Number(sessionStorage.getItem(TRIES) ?? 0);
const given = setTimeout(again, 10_000);

function again() {
  if (tries >= MOST) return;
  sessionStorage.setItem(TRIES, String(tries + 1));
  setTimeout(() => location.reload(), WAIT_MS);
}

import('./main.js').then(() => sessionStorage.removeItem(TRIES), again).finally(() => clearTimeout(given));
