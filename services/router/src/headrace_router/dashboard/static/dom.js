// Elements without markup in strings: text stays text.

export const $ = (id) => document.getElementById(id);

/** An element with properties, data-* and aria-* attributes, and children. */
export function el(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key.includes('-') || key === 'role') made.setAttribute(key, value);
    else made[key] = value;
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function svg(name, attributes = {}) {
  const made = document.createElementNS('http://www.w3.org/2000/svg', name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

/** Sets text only where it differs, so that nothing is laid out or read out again for nothing. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Whether things may move. Asked each time: people change it while the page is open. */
export const mayMove = () => !matchMedia('(prefers-reduced-motion: reduce)').matches;

/** A definition list of figures: `set(name, text)` changes one. */
export function figures(list, names) {
  const values = new Map();
  for (const [name, label] of names) {
    const value = el('dd', { textContent: '–' });
    value.dataset.figure = name;
    list.append(el('div', {}, el('dt', { textContent: label }), value));
    values.set(name, value);
  }
  return { set: (name, text) => say(values.get(name), text) };
}
