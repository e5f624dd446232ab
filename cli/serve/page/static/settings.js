// Settings: the theme, sampling of requests, the key; and what of them a request carries.

import { byId } from "./dom.js";

const NUMBERS = {
  temperature: Number,
  top_p: Number,
  top_k: Math.trunc,
  seed: Math.trunc,
  max_tokens: Math.trunc,
};

const THEMES = { auto: "◐ Auto", light: "○ Light", dark: "● Dark" };

// What a request says of sampling: only what is set, the rest is the server's.
export const samplingOf = (settings) => {
  const said = {};
  for (const name of Object.keys(NUMBERS)) {
    if (typeof settings[name] === "number") said[name] = settings[name];
  }
  return said;
};

const showTheme = (theme) => {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = THEMES[theme];
  byId("theme").setAttribute("aria-label", `Theme: ${theme}`);
};

const prepareTheme = (store) => {
  const names = Object.keys(THEMES);
  showTheme(names.includes(store.settings.theme) ? store.settings.theme : "auto");
  byId("theme").addEventListener("click", () => {
    const place = names.indexOf(document.documentElement.dataset.theme);
    const theme = names[(place + 1) % names.length];
    store.set("theme", theme);
    showTheme(theme);
  });
};

// What is set, by another tab, too.
const fill = (store) => {
  for (const name of [...Object.keys(NUMBERS), "n_max"]) {
    byId(name).value = typeof store.settings[name] === "number" ? store.settings[name] : "";
  }
  byId("system").value = store.settings.system ?? "";
};

const prepareNumber = (store, name, cut) => {
  const field = byId(name);
  field.addEventListener("change", () => {
    const value = field.value === "" || !field.validity.valid ? null : cut(Number(field.value));
    store.set(name, value);
  });
};

export const prepareSettings = (store, { onKey, onForget }) => {
  prepareTheme(store);
  const dialog = byId("settings");
  byId("open-settings").addEventListener("click", () => {
    fill(store);
    dialog.showModal();
  });
  byId("system").addEventListener("change", () => store.set("system", byId("system").value));
  for (const [name, cut] of Object.entries({ ...NUMBERS, n_max: Math.trunc })) {
    prepareNumber(store, name, cut);
  }
  const colours = byId("colours");
  const colour = () => document.body.classList.toggle("coloured", colours.checked);
  colours.checked = store.settings.colours !== false;
  colours.addEventListener("change", () => {
    store.set("colours", colours.checked);
    colour();
  });
  colour();
  byId("key").value = store.key;
  byId("key").addEventListener("change", () => {
    store.setKey(byId("key").value.trim());
    onKey();
  });
  byId("delete-conversations").addEventListener("click", () => {
    onForget();
    dialog.close();
  });
};
