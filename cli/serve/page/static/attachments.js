// Text files that go with the next message: chosen, dropped or pasted.

import { byId, html } from "./dom.js";

const MOST_BYTES = 256 * 1024; // of a file; a context holds less
const MOST_FILES = 8;

export const sizeWords = (bytes) =>
  bytes < 1024 ? `${bytes} bytes` : `${(bytes / 1024).toFixed(bytes < 10240 ? 1 : 0)} KiB`;

// The text of a file's bytes; throws a sentence if they are none.
export const textOf = (name, bytes) => {
  if (bytes.byteLength > MOST_BYTES) {
    const most = sizeWords(MOST_BYTES);
    throw new Error(`${name} has ${sizeWords(bytes.byteLength)}: a file may have ${most}.`);
  }
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    throw new Error(`${name} is not a text file in UTF-8.`);
  }
  if (text.includes("\0")) throw new Error(`${name} is not a text file.`);
  if (!text.trim()) throw new Error(`${name} is empty.`);
  return text.replaceAll("\r\n", "\n");
};

// A file as it stands in a message: its text unfolds.
export const fileElement = ({ name, text }) =>
  html(
    "details",
    { class: "file" },
    html("summary", {}, name, html("small", {}, sizeWords(new Blob([text]).size))),
    html("pre", { tabindex: "0" }, text),
  );

export class Attachments {
  constructor(onProblem) {
    this.onProblem = onProblem;
    this.files = [];
    this.list = byId("attached");
    const input = byId("files");
    byId("attach").addEventListener("click", () => input.click());
    input.addEventListener("change", async () => {
      await this.add([...input.files]);
      input.value = "";
    });
    byId("message").addEventListener("paste", (event) => {
      const files = [...(event.clipboardData?.files ?? [])];
      if (!files.length) return;
      event.preventDefault();
      this.add(files);
    });
    this._receive(byId("chat"));
  }

  async add(files) {
    this.onProblem("");
    for (const file of files) {
      try {
        if (this.files.length >= MOST_FILES) {
          throw new Error(`A message may have ${MOST_FILES} files.`);
        }
        // What is too large is not read.
        const bytes = file.size > MOST_BYTES ? { byteLength: file.size } : await file.arrayBuffer();
        this.files.push({ name: file.name, text: textOf(file.name, bytes) });
      } catch (problem) {
        this.onProblem(problem.message);
      }
    }
    this._show();
    byId("message").focus();
  }

  // Give the files away, to a message.
  take() {
    const { files } = this;
    this.give([]);
    return files;
  }

  give(files) {
    this.files = [...files];
    this._show();
  }

  _show() {
    const items = this.files.map((file) => {
      const remove = html("button", { type: "button", "aria-label": `Remove ${file.name}` }, "×");
      remove.addEventListener("click", () => {
        this.give(this.files.filter((each) => each !== file));
        byId("message").focus();
      });
      return html("li", {}, html("span", {}, file.name), remove);
    });
    this.list.replaceChildren(...items);
    this.list.hidden = !items.length;
  }

  _receive(area) {
    const isFile = (event) => event.dataTransfer?.types.includes("Files");
    const mark = (on) => area.classList.toggle("receives", on);
    area.addEventListener("dragover", (event) => {
      if (!isFile(event)) return;
      event.preventDefault();
      mark(true);
    });
    area.addEventListener("dragleave", (event) => {
      if (!area.contains(event.relatedTarget)) mark(false);
    });
    area.addEventListener("drop", (event) => {
      mark(false);
      if (!isFile(event)) return;
      event.preventDefault();
      this.add([...event.dataTransfer.files]);
    });
  }
}
