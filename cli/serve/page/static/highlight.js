// Code in colours: comments, strings, numbers and keywords of common languages. The pieces
// { text, kind } spell the code exactly, whatever the language is.

const MOST = 60_000; // characters that are coloured; longer code is plain

const words = (text) => new Set(text.split(" "));

// What has no end yet is a comment or a text up to the end.
const upTo = (begin, end) => `${begin}[^]*?(?:${end}|$(?![^]))`;
const SLASHES = `//.*|${upTo("/\\*", "\\*/")}`;

const C_WORDS =
  "auto bool break case char const constexpr continue default delete do double else enum extern "
  + "false float for goto if inline int long namespace new nullptr private protected public return "
  + "short signed sizeof static struct switch template this throw true try catch typedef typename "
  + "union unsigned using virtual void volatile while class NULL override";
const JS_WORDS =
  "abstract any as async await boolean break case catch class const continue debugger declare "
  + "default delete do else enum export extends false finally for from function get if implements "
  + "import in instanceof interface keyof let new null number of private protected public readonly "
  + "return set static string super switch this throw true try type typeof undefined unknown var "
  + "void while with yield";
const JVM_WORDS =
  "abstract as assert boolean break by byte case catch char class companion const continue data "
  + "default do double else enum extends false final finally float for fun if implements import in "
  + "init instanceof int interface internal is lateinit long namespace native new null object open "
  + "operator out override package params private protected public readonly record return sealed "
  + "short static string super suspend switch synchronized this throw throws transient true try "
  + "typeof using val var virtual void volatile when while yield";
const SQL_WORDS =
  "add all alter and any as asc begin between by case check column commit constraint create cross "
  + "database default delete desc distinct drop else end exists foreign from full group having if "
  + "in index inner insert into is join key left like limit not null offset on or order outer "
  + "primary references returning right rollback select set table then true false union unique "
  + "update using values view when where with";

// What a language's comments and strings are; `case`: its keywords are read without their case.
const LANGUAGES = {
  python: {
    comments: "#.*",
    strings: `[rbfuRBFU]{0,2}(?:${upTo('"""', '"""')}|${upTo("'''", "'''")})`,
    words: words(
      "and as assert async await break case class continue def del elif else except False finally "
      + "for from global if import in is lambda match None nonlocal not or pass raise return True "
      + "try while with yield self",
    ),
  },
  javascript: { comments: SLASHES, ticks: true, words: words(JS_WORDS) },
  c: { comments: `${SLASHES}|^[ \\t]*#.*`, words: words(C_WORDS) },
  java: { comments: SLASHES, words: words(JVM_WORDS) },
  rust: {
    comments: SLASHES,
    quotes: '"', // 'a is a lifetime
    words: words(
      "as async await box break const continue crate dyn else enum extern false fn for if impl in "
      + "let loop match mod move mut pub ref return self Self static struct super trait true type "
      + "unsafe use where while bool char f32 f64 i8 i16 i32 i64 isize str u8 u16 u32 u64 usize "
      + "String Vec Option Result Some None Ok Err",
    ),
  },
  go: {
    comments: SLASHES,
    ticks: true,
    words: words(
      "bool break byte case chan const continue default defer else error fallthrough false float64 "
      + "for func go goto if import int int64 interface iota map nil package range return rune "
      + "select string struct switch true type uint var",
    ),
  },
  shell: {
    comments: "(?<![^\\s;])#.*",
    words: words(
      "if then else elif fi for in do done while until case esac function return local export "
      + "readonly declare unset set source exit break continue echo cd sudo eval exec trap",
    ),
  },
  sql: { comments: `--.*|${upTo("/\\*", "\\*/")}`, case: true, words: words(SQL_WORDS) },
  ruby: {
    comments: "#.*",
    words: words(
      "alias and begin break case class def do else elsif end ensure false for if in module next "
      + "nil not or redo rescue retry return self super then true unless until when while yield",
    ),
  },
  lua: {
    comments: `${upTo("--\\[\\[", "\\]\\]")}|--.*`,
    words: words(
      "and break do else elseif end false for function goto if in local nil not or repeat return "
      + "then true until while",
    ),
  },
  data: { comments: "#.*|//.*", words: words("true false null yes no on off") },
  markup: {
    comments: upTo("<!--", "-->"),
    tags: "</?[A-Za-z][\\w:.-]*|/?>",
    words: words(""),
  },
  css: {
    comments: upTo("/\\*", "\\*/"),
    words: words("important inherit initial none auto"),
  },
};

const ALIASES = {
  py: "python", python3: "python", pycon: "python", cython: "python", starlark: "python",
  js: "javascript", jsx: "javascript", mjs: "javascript", ts: "javascript", tsx: "javascript",
  typescript: "javascript", node: "javascript",
  cpp: "c", "c++": "c", cc: "c", h: "c", hpp: "c", cuda: "c", cu: "c", objc: "c", glsl: "c",
  kotlin: "java", kt: "java", cs: "java", csharp: "java", "c#": "java", scala: "java",
  groovy: "java", swift: "java", dart: "java", php: "javascript",
  rs: "rust", golang: "go", bash: "shell", sh: "shell", zsh: "shell", fish: "shell",
  console: "shell", dockerfile: "shell", make: "shell", makefile: "shell", powershell: "shell",
  rb: "ruby", elixir: "ruby", postgres: "sql", postgresql: "sql", mysql: "sql", sqlite: "sql",
  json: "data", jsonc: "data", json5: "data", jsonl: "data", yaml: "data", yml: "data",
  toml: "data", ini: "data", conf: "data", properties: "data", r: "python", julia: "python",
  html: "markup", xml: "markup", svg: "markup", xhtml: "markup", vue: "markup",
  scss: "css", less: "css",
};

const patterns = new Map();

const patternOf = (name) => {
  if (!patterns.has(name)) {
    const { comments, strings, quotes = "\"'", ticks, tags } = LANGUAGES[name];
    const texts = [...quotes].map((mark) => `${mark}(?:[^${mark}\\\\\\n]|\\\\.)*${mark}?`);
    if (ticks) texts.push("`(?:[^`\\\\]|\\\\[^])*`?");
    const parts = [
      `(?<comment>${comments})`,
      `(?<string>${[strings, ...texts].filter(Boolean).join("|")})`,
      tags ? `(?<keyword>${tags})` : null,
      "(?<number>(?<![\\w$])(?:0[xXbBoO][\\da-fA-F_]+|\\d[\\d_]*(?:\\.\\d+)?(?:[eE][+-]?\\d+)?)"
        + "\\w*)",
      "(?<word>[\\p{L}_$][\\p{L}\\p{N}_$]*)",
    ];
    patterns.set(name, new RegExp(parts.filter(Boolean).join("|"), "gmu"));
  }
  return patterns.get(name);
};

const KINDS = ["comment", "string", "keyword", "number"];

const kindOf = (groups, language, code, end) => {
  if (groups.word === undefined) return KINDS.find((kind) => groups[kind] !== undefined);
  if (language.words.has(language.case ? groups.word.toLowerCase() : groups.word)) return "keyword";
  return code[end] === "(" ? "call" : null;
};

const differences = (code) =>
  code.split(/(?<=\n)/).map((text) => {
    if (/^(?:@@|diff |index |\+\+\+|---)/.test(text)) return { text, kind: "keyword" };
    if (text.startsWith("+")) return { text, kind: "added" };
    return { text, kind: text.startsWith("-") ? "removed" : null };
  });

export const highlight = (code, language) => {
  const key = language.toLowerCase();
  if (code.length > MOST) return [{ text: code, kind: null }];
  if (key === "diff" || key === "patch") return differences(code);
  const name = Object.hasOwn(ALIASES, key) ? ALIASES[key] : key;
  if (!Object.hasOwn(LANGUAGES, name)) return code ? [{ text: code, kind: null }] : [];
  const pieces = [];
  const add = (text, kind) => {
    const last = pieces.at(-1);
    if (last?.kind === kind) last.text += text;
    else if (text) pieces.push({ text, kind });
  };
  let place = 0;
  for (const found of code.matchAll(patternOf(name))) {
    if (!found[0]) continue;
    add(code.slice(place, found.index), null);
    place = found.index + found[0].length;
    add(found[0], kindOf(found.groups, LANGUAGES[name], code, place));
  }
  add(code.slice(place), null);
  return pieces;
};
