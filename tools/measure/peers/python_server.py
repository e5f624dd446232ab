"""llama-cpp-python's own `Llama` behind HTTP: started as a program, one request after another.

llama-cpp-python's server needs packages that specrun has not, and sends no timings. This one has
the form that the client of `measure peers` reads: a stream of text, then what was counted. Only
llama-cpp-python and Python's library are imported, so that nothing of specrun is in the times.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens")


class CountingLlama(Llama):
    """A `Llama` that counts its rounds and the tokens that it samples."""

    rounds = 0
    sampled = 0

    def eval(self, tokens: Any) -> None:  # noqa: ANN401 - as in the class above
        """Evaluate tokens: the prompt, or a token and its drafts."""
        self.rounds += 1
        super().eval(tokens)

    def sample(self, *args: Any, **settings: Any) -> int:  # noqa: ANN401 - as in the class above
        """Sample the next token."""
        self.sampled += 1
        return int(super().sample(*args, **settings))


def chunks(llama: CountingLlama, body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the pieces of an answer, and then the counts in the form of llama-server's timings."""
    llama.rounds = llama.sampled = 0
    settings = {name: body[name] for name in _SETTINGS if name in body}
    pieces: Iterable[Any]
    if "prompt" in body:
        pieces = llama.create_completion(body["prompt"], stream=True, **settings)
    else:
        pieces = llama.create_chat_completion(body["messages"], stream=True, **settings)
    for piece in pieces:
        yield {"choices": piece["choices"]}
    accepted = max(0, llama.sampled - llama.rounds)
    yield {"choices": [], "timings": {"predicted_n": llama.sampled, "draft_n_accepted": accepted}}


def opened(line: argparse.Namespace) -> CountingLlama:
    """Open the model as its users do: the defaults of `Llama` but for the given options."""
    draft = None
    if line.prompt_lookup is not None:
        draft = LlamaPromptLookupDecoding(num_pred_tokens=line.prompt_lookup)
    return CountingLlama(
        line.model,
        n_ctx=line.ctx_size,
        n_threads=line.threads,
        n_threads_batch=line.threads,
        n_gpu_layers=line.n_gpu_layers,
        flash_attn=line.flash_attn != "off",
        draft_model=draft,
        verbose=False,
    )


def options() -> argparse.Namespace:
    """Read the command line: llama-server's names, as far as they mean anything here."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-c", "--ctx-size", type=int, default=4096)
    parser.add_argument("-t", "--threads", type=int, default=None)
    parser.add_argument("-np", "--parallel", type=int, choices=(1,), default=1)
    parser.add_argument("-ngl", "--n-gpu-layers", type=int, default=0)
    parser.add_argument("-fa", "--flash-attn", choices=("on", "off", "auto"), default="auto")
    parser.add_argument("--prompt-lookup", type=int, metavar="N", help="draft up to N tokens")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    return parser.parse_args()


def main() -> None:
    """Open the model, and answer until the process is ended."""
    line = options()
    llama = opened(line)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()
            for chunk in chunks(llama, body):
                self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")

    HTTPServer((line.host, line.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
