// Asks for a key when the server wants one.

import { setKey } from './api.js';
import { $, say } from './dom.js';

/** Resolves when a key was given; it may be the wrong one. */
export function askForKey(message) {
  const dialog = $('key-dialog');
  say($('key-text'), `${message} It is kept in this tab only.`);
  $('key').value = '';
  return new Promise((done) => {
    const given = (event) => {
      event.preventDefault();
      const key = $('key').value.trim();
      if (!key) return;
      $('key-form').removeEventListener('submit', given);
      setKey(key);
      dialog.close();
      done();
    };
    $('key-form').addEventListener('submit', given);
    if (!dialog.open) dialog.showModal();
  });
}
