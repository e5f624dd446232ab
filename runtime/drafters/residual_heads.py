"""Heads of residual blocks over a state: Medusa's, and Hydra's, which read drafted tokens, too."""

from __future__ import annotations

from collections.abc import Sequence

from specrun.bindings.errors import OptionError
from specrun.bindings.ggml import GraphBuilder, Tensor
from specrun.bindings.models.model import Model
from specrun.runtime.heads.file import HeadFile, stored_accuracy
from specrun.runtime.heads.graphs import HeadWeights
from specrun.runtime.planning.theory import multiplied

_MAX_HEADS, _MAX_BLOCKS = 32, 16


class ResidualHeads(HeadWeights):
    """A file's heads, each of residual blocks and an output matrix, the target's if it has none.

    Head k reads the target's state; `grounded` ones also the embeddings of k + 1 tokens. `names`
    are more tensors to load. `evaluated_params` are the weights that an evaluation of all heads
    reads, `accuracy` their shares of right guesses, if the file has them.
    """

    def __init__(
        self,
        file: HeadFile,
        target: Model,
        n_threads: int,
        *,
        grounded: bool = False,
        names: Sequence[str] = (),
    ) -> None:
        self.n_heads, self._title = file.size("head_count", _MAX_HEADS), file.kind.capitalize()
        self.accuracy = stored_accuracy(file, self.n_heads)
        self.hidden, self.vocab_size = target.n_embd, file.size("vocab_size")
        self.n_blocks, self._kind = file.size("block_count", _MAX_BLOCKS), file.kind
        own: list[str] = []
        for head in range(self.n_heads):
            own += self._tensor_names(file, head, grounded=grounded)
        # A head without an output matrix reads the target's, which its cost has to include.
        shared = self.n_heads - sum(name.endswith(".output.weight") for name in own)
        self.evaluated_params = multiplied(file.header, file.header.tensors)
        self.evaluated_params += shared * self.hidden * self.vocab_size
        self.ranks: tuple[int, ...] = ()
        super().__init__(file, [*own, *names], target, n_threads)
        try:
            self._output = self._target.output() if shared else None
        except BaseException:
            self.close()
            raise

    def _tensor_names(self, file: HeadFile, head: int, *, grounded: bool) -> list[str]:
        """Return a head's tensors, checked."""
        hidden, vocab_size = file.size("embedding_length"), self.vocab_size
        reads = hidden * (head + 2) if grounded else hidden
        linear = {f"res.{block}": hidden if block else reads for block in range(self.n_blocks)}
        linear |= {"skip": reads} if grounded else {}
        shapes: dict[str, tuple[int, ...]] = {}
        for name, width in linear.items():
            shapes |= {f"{name}.weight": (width, hidden), f"{name}.bias": (hidden,)}
        optional: dict[str, tuple[int, ...]] = {"output.weight": (hidden, vocab_size)}
        optional["output.bias"] = (vocab_size,)
        prefix = f"{file.kind}.{head}."
        shapes |= {name: shape for name, shape in optional.items() if prefix + name in file}
        return [file.require(prefix + name, shape) for name, shape in shapes.items()]

    @property
    def depth_params(self) -> float:
        """The parameters of one head, and of the output matrix that it reads."""
        return self.evaluated_params / self.n_heads

    def check_depth(self, depth: int) -> None:
        """Raise `OptionError` for trees that are deeper than the heads reach."""
        if not 0 < depth <= self.n_heads:
            reach = f"these {self._title} heads reach 1 to {self.n_heads} tokens deep"
            raise OptionError(f"a tree of depth {depth}: {reach}")

    def logits(self, builder: GraphBuilder, head: int, x: Tensor) -> Tensor:
        """Return a head's logits (vocab, n) for its inputs, (width, n)."""
        weights = self.tensors(f"{self._kind}.{head}.")

        def linear(name: str, x: Tensor) -> Tensor:
            product = builder.mul_mat(weights[f"{name}.weight"], x)
            return builder.add(product, weights[f"{name}.bias"])

        for block in range(self.n_blocks):
            # Only the first block of grounded heads changes the width: there x itself cannot be
            # the residual.
            has_skip = block == 0 and weights.get("skip.weight") is not None
            around = linear("skip", x) if has_skip else x
            x = builder.add(around, builder.silu(linear(f"res.{block}", x)))
        matrix, bias = weights.get("output.weight") or self._output, weights.get("output.bias")
        assert matrix is not None
        logits = builder.mul_mat(matrix, x)
        return logits if bias is None else builder.add(logits, bias)
