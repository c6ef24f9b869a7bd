// Light or dark: as the system has it, unless the person chose.

import { $, say } from './dom.js';

const CHOICE = 'headrace-theme';
const system = matchMedia('(prefers-color-scheme: dark)');

const isDark = () => (localStorage.getItem(CHOICE) ?? (system.matches ? 'dark' : 'light')) === 'dark';

/** `changed` is called when colours differ. */
export function setUpTheme(changed) {
  const apply = () => {
    document.documentElement.dataset.theme = isDark() ? 'dark' : 'light';
    say($('theme'), isDark() ? 'Light' : 'Dark');
    $('theme').setAttribute('aria-label', isDark() ? 'Use light colours' : 'Use dark colours');
  };
  apply();
  $('theme').addEventListener('click', () => {
    localStorage.setItem(CHOICE, isDark() ? 'light' : 'dark');
    apply();
    changed();
  });
  system.addEventListener('change', () => {
    apply();
    changed();
  });
}
