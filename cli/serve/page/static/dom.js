// Elements of the page. Text only ever becomes a text node: nothing that a model says is markup.

export const byId = (id) => document.getElementById(id);

const fill = (element, attributes, children) => {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
};

export const html = (name, attributes = {}, ...children) =>
  fill(document.createElement(name), attributes, children);

export const svg = (name, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);

// Bars: a width set by script is no inline style, which the content policy forbids.
export const bar = (kind, share) => {
  const element = html("div", { class: share === null ? `bar ${kind} unknown` : `bar ${kind}` });
  element.style.width = `${Math.max(0, Math.min(1, share ?? 0)) * 100}%`;
  return element;
};

export const percent = (share) => {
  if (share === null || share === undefined) return "–";
  const value = share * 100;
  if (value > 0 && value < 0.1) return "<0.1 %";
  return `${value.toFixed(value < 9.95 || (value > 99 && value < 100) ? 1 : 0)} %`;
};

export const milliseconds = (seconds) => {
  const value = seconds * 1000;
  return value >= 1000 ? `${seconds.toFixed(2)} s` : `${value.toFixed(value < 10 ? 2 : 0)} ms`;
};

// A token as it is shown where spaces matter: visible, and no longer than there is room.
export const shown = (text, most = Infinity) => {
  const visible = text.replace(/ /g, "·").replace(/\n/g, "↵").replace(/\t/g, "⇥");
  const characters = [...visible];
  if (characters.length === 0) return "∅";
  if (characters.length <= most) return visible;
  return `${characters.slice(0, Math.max(1, most - 1)).join("")}…`;
};
