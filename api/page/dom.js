// DOM helpers without HTML. Names of nodes, models and clients become text, never markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** Returns an element with attributes and children. Strings become text. */
export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function shape(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null && value !== false) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** Sets a text if it differs. Unchanged text is not announced or painted again. */
export function say(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

export function mark(target, name, value) {
  if (target.getAttribute(name) !== value) target.setAttribute(name, value);
}

/** Returns a table row of empty cells with these classes. */
export const tableRow = (...classes) =>
  element("tr", {}, ...classes.map((name) => element("td", { class: name || null })));

/** Shows pairs of name and text in a description list. */
export function showFacts(list, facts) {
  const make = ([name]) => element("div", {}, element("dt", {}, name), element("dd"));
  keep(list, facts, ([name]) => name, make, (item, [, value]) => say(item.lastChild, value));
}

/**
 * Keeps one child of `parent` for each item, in order, by key. Children are created once and updated
 * in place, so focus, scroll position and open details stay.
 */
export function keep(parent, items, key, make, update) {
  const present = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let next = parent.firstElementChild;
  for (const item of items) {
    const name = key(item);
    let child = present.get(name);
    if (child === undefined) {
      child = make(item);
      child.dataset.key = name;
    }
    present.delete(name);
    if (child === next) next = next.nextElementSibling;
    else parent.insertBefore(child, next);
    update(child, item);
  }
  for (const child of present.values()) child.remove();
}
