"""C functions of llama.cpp, ggml and libgomp, by name: a table of their prototypes."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from specrun.bindings.library import native_function

_KINDS: dict[str, Any] = {
    **{"p": ctypes.c_void_p, "t": ctypes.c_char_p, "b": ctypes.c_bool, "f": ctypes.c_float},
    **{"i": ctypes.c_int32, "u": ctypes.c_uint32, "l": ctypes.c_int64, "s": ctypes.c_size_t},
    "v": None,
}
# An operation takes the context first and returns a tensor; the letters are its other arguments.
_OPERATIONS = """
    ggml_add:pp ggml_argmax:p ggml_argsort:pi ggml_cast:pi ggml_concat:ppi ggml_cont:p ggml_cpy:pp
    ggml_get_rows:pp ggml_log:p ggml_mul:pp ggml_mul_mat:pp ggml_permute:piiii ggml_reshape_2d:pll
    ggml_reshape_3d:plll ggml_rms_norm:pf ggml_rope_ext:pppiiiffffff ggml_scale:pf ggml_set_rows:ppp
    ggml_silu:p ggml_soft_max:p ggml_soft_max_ext:ppff ggml_sub:pp ggml_swiglu_split:pp
    ggml_top_k:pi ggml_view_2d:pllss
"""
# A function's result, then its arguments.
_FUNCTIONS = """
    ggml_build_forward_expand:vpp ggml_free:vp ggml_get_data:pp ggml_graph_overhead_custom:ssb
    ggml_nbytes:sp ggml_new_graph_custom:ppsb ggml_new_tensor:ppiip ggml_op_name:ti
    ggml_set_input:vp ggml_set_name:ppt ggml_set_output:vp ggml_tensor_overhead:s

    ggml_backend_alloc_ctx_tensors_from_buft:ppp ggml_backend_buffer_clear:vpi
    ggml_backend_buffer_free:vp ggml_backend_buffer_get_type:pp ggml_backend_buffer_is_host:bp
    ggml_backend_buffer_set_usage:vpi ggml_backend_buft_get_device:pp ggml_backend_buft_is_host:bp
    ggml_backend_cpu_set_n_threads:vpi ggml_backend_free:vp ggml_backend_get_default_buffer_type:pp
    ggml_backend_sched_alloc_graph:bpp ggml_backend_sched_free:vp
    ggml_backend_sched_graph_compute:ipp ggml_backend_sched_new:pppisbb
    ggml_backend_supports_op:bpp ggml_backend_tensor_get:vppss ggml_backend_tensor_set:vppss

    ggml_backend_dev_backend_reg:pp ggml_backend_dev_buffer_type:pp ggml_backend_dev_by_type:pi
    ggml_backend_dev_count:s ggml_backend_dev_description:tp ggml_backend_dev_get:ps
    ggml_backend_dev_get_props:vpp ggml_backend_dev_init:ppt ggml_backend_dev_name:tp
    ggml_backend_dev_type:ip ggml_backend_reg_by_name:pt ggml_backend_reg_count:s
    ggml_backend_reg_dev_count:sp ggml_backend_reg_dev_get:pps ggml_backend_reg_get:ps
    ggml_backend_reg_get_proc_address:ppt ggml_backend_reg_name:tp ggml_backend_register:vp

    ggml_cpu_bf16_to_fp32:vppl ggml_cpu_fp32_to_fp16:vppl ggml_quantize_chunk:sipplllp
    ggml_set_abort_callback:pp ggml_validate_row_data:bips GOMP_parallel:vppuu

    llama_adapter_lora_init:ppt llama_get_embeddings:pp llama_get_logits:pp
    llama_get_sampled_candidates_count_ith:upi llama_get_sampled_candidates_ith:ppi
    llama_get_sampled_logits_ith:ppi llama_memory_seq_cp:vpiiii llama_memory_seq_rm:bpiii
    llama_sampler_chain_add:vpp llama_sampler_free:vp llama_sampler_init_top_k:pi
    llama_set_adapters_lora:ippsp llama_set_causal_attn:vpb llama_set_sampler:bpip
    llama_state_seq_get_data_ext:sppsiu llama_state_seq_get_size:spi
    llama_state_seq_get_size_ext:spiu llama_state_seq_load_file:sptipsp
    llama_state_seq_save_file:sptips llama_state_seq_set_data_ext:sppsiu
    llama_token_to_piece:ipipiib
"""
_PROTOTYPES: dict[str, str] = dict(entry.split(":") for entry in _FUNCTIONS.split())
_PROTOTYPES |= {name: f"pp{own}" for name, own in (e.split(":") for e in _OPERATIONS.split())}


@functools.cache
def call(name: str) -> Any:  # noqa: ANN401 - a ctypes function
    """Return a function of the table, ready to be called; AttributeError if the library has none.

    Arrays are given for pointers, and integers for the handles that other functions returned.
    """
    result, *arguments = (_KINDS[letter] for letter in _PROTOTYPES[name])
    return native_function(name, result, *arguments)
