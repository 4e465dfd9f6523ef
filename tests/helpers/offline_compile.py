"""Compile every Triton kernel for GPUs that are not installed; run as a script it prints JSON lines.

Must run in its own process, because kernels imported under TRITON_INTERPRET=1 cannot be compiled.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Bytes of shared memory that a program may have, by compute capability."""
CAPABILITIES = tuple(SHARED_MEMORY)


def cases(capability: int) -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    """Return (name, kernel, argument types, constexprs, launch options) of all kernels for a compute capability."""
    import torch

    from stoker.kernels import bias_gradients, embedding, norm_residual
    from stoker.kernels.cross_entropy_kernels import _loss_and_gradient_kernel
    from stoker.kernels.cross_entropy_kernels import launch_options as loss_options
    from stoker.kernels.dropout import _dropout_kernel
    from stoker.kernels.fused_qkv_rope import fused_qkv_rope_kernel
    from stoker.kernels.gated_activation import _backward_kernel, _forward_kernel
    from stoker.kernels.lora import lora_forward as narrow_updates
    from stoker.kernels.lora import lora_gated_mlp, lora_grad
    from stoker.kernels.moe import counting_sort
    from stoker.kernels.moe.peer_rows import send_kernel
    from stoker.kernels.optim import multi_tensor, sum_of_squares
    from stoker.kernels.optim.adamw_kernel import _adamw_kernel
    from stoker.kernels.scale_in_place import scale_kernel
    from stoker.kernels.sum_over_ranks import sum_over_ranks_kernel
    from stoker.kernels.vocabulary_part import _part_gradient_kernel, _statistics_kernel

    table = {"table_pointer": "*i64", "tensors": "i32", "search_steps": "i32"}
    scalars = dict.fromkeys(("decay_factor", "one_minus_beta1", "beta2", "one_minus_beta2", "eps"), "fp32")
    on_device = dict.fromkeys(("grad_scale_pointer", "step_size_pointer", "correction2_root_pointer"), "*fp32")
    adamw = table | on_device | scalars
    fp32, bf16 = (multi_tensor.triton_dtype(dtype) for dtype in (torch.float32, torch.bfloat16))
    arrays = {"PARAM": bf16, "MAIN": fp32, "GRAD": bf16, "EXP_AVG": fp32, "EXP_AVG_SQ": fp32}
    loss = {
        "logits_pointer": "*bf16",
        "labels_pointer": "*i64",
        "losses_pointer": "*fp32",
        "denominator_pointer": "*fp32",
        "row_weights_pointer": "*fp32",
        "row_stride": "i32",
        "valid_vocab": "i32",
        "padded_vocab": "i32",
        "ignore_index": "i32",
        "smoothing": "fp32",
        "softcap": "fp32",
        "z_loss": "fp32",
    }
    part = {
        name: kind for name, kind in loss.items() if name not in ("losses_pointer", "row_weights_pointer", "z_loss")
    }
    part |= {"first": "i32", "logsumexp_pointer": "*fp32", "spread": "fp32"}
    statistics = {
        name: part[name]
        for name in ("logits_pointer", "labels_pointer", "row_stride", "valid_vocab", "padded_vocab", "first")
    }
    statistics |= {"statistics_pointer": "*fp32", "vocabulary": "i32", "ignore_index": "i32", "softcap": "fp32"}
    loss_launches: dict[bool, dict[str, Any]] = {width % 16 == 0: loss_options(width) for width in (50304, 50257)}
    loss_blocks = {aligned: {"BLOCK": launch.pop("BLOCK")} for aligned, launch in loss_launches.items()}
    dropout = dict.fromkeys(("values_pointer", "out_pointer"), "*bf16") | {"residual_pointer": "*fp32"}
    dropout |= dict.fromkeys(("key_pointer", "rows_pointer"), "*i64") | {"scale": "fp32"}
    dropout |= dict.fromkeys(("rows", "channels", "threshold"), "i32")
    dropout_tile = {"ROWS": 2, "BLOCK": 1024}
    scaled_in_place = {"tensor_pointer": "*bf16", "factor_pointer": "*fp32"}
    scaled_in_place |= dict.fromkeys(("size", "rounds", "stride"), "i32")
    over_ranks = dict.fromkeys(("own_pointer", "received_pointer"), "*bf16")
    over_ranks |= {"output_pointer": "*fp32", "size": "i32", "row": "i32"}
    gated_forward = {"gate_up_pointer": "*bf16", "product_pointer": "*bf16", "width": "i32"}
    gated_backward = {"gate_up_pointer": "*bf16", "product_gradient_pointer": "*bf16", "gradient_pointer": "*bf16"}
    gated_backward |= {"width": "i32"}
    gated_projection = gated_backward | {"product_pointer": "*bf16"}
    gated, no_product = {"BLOCK": 1024, "KIND": "gelu_tanh"}, {"product_pointer": None}
    options = {"num_warps": 4, "enable_fp_fusion": True}
    parts = dict.fromkeys(("projected_pointer", "query_pointer", "key_pointer", "value_pointer"), "*bf16")
    angles = {"cosine_pointer": "*fp32", "sine_pointer": "*fp32", "tokens": "i32", "angle_stride": "i32"}
    strides = {f"{part}_stride_{of}": "i32" for part in ("query", "key", "value") for of in ("row", "token", "head")}
    heads = {
        "HEADS": 32,
        "GROUPS": 8,
        "HEAD_DIM": 80,
        "HALF": 20,
        "BLOCK_HEADS": 32,
        "BLOCK_HALF": 32,
        "BLOCK_REST": 64,
    }
    narrow = {f"{name}_pointer": "*bf16" for name in ("gradient", "lora_b", "low")}
    narrow |= {f"{name}_pointer": "*fp32" for name in ("low_gradient", "lora_b_gradient")}
    narrow |= dict.fromkeys(("rows", "columns", "chunk_rows", "gradient_stride", "low_stride"), "i32")
    narrow |= {f"{place}_{of}": "i32" for place in ("second", "third") for of in ("column", "block")}
    lora = {f"{name}_pointer": "*bf16" for name in ("gate_up", "up_low", "up_b")}
    sizes = {"rows": "i32", "width": "i32"}
    lora_forward = lora | {f"{name}_pointer": "*bf16" for name in ("down_a", "product", "down_low")}
    lora_forward |= sizes | {"scale": "fp32"}
    lora_backward = lora | {
        f"{name}_pointer": "*bf16" for name in ("product_gradient", "down_low_gradient", "gate_up_gradient")
    }
    lora_backward |= {"down_a_gradient_pointer": "*fp32"} | sizes | {"chunk_rows": "i32", "scale": "fp32"}

    norm = ("inputs", "weight", "bias", "residual_gradient", "first_gradient", "second_gradient", "gradient", "normed")
    norm_types = {f"{name}_pointer": "*bf16" for name in norm} | {"partial_pointer": "*fp32"}
    norm_types |= dict.fromkeys(("rows", "width", "chunk_rows"), "i32") | {"epsilon": "fp32"}

    def norm_of(width: int, again: bool, centered: bool) -> Any:
        absent = ["second_gradient_pointer"] if again else ["normed_pointer"]
        absent += [] if again and centered else ["bias_pointer"]
        flags: dict[str, Any] = {"SECOND": not again, "WRITE_NORMED": again, "CENTERED": centered}
        flags["SUM_RESIDUAL"] = centered and not again
        constants = flags | {"ZERO_CENTERED": True} | dict.fromkeys(absent) | norm_residual.launch_options(width)
        launch = {name: constants.pop(name) for name in ("num_warps", "enable_fp_fusion")}
        types = {name: kind for name, kind in norm_types.items() if name not in absent}
        name = f"{'layer' if centered else 'rms'}_norm_{width}" + "_again" * again
        return name, norm_residual.norm_residual_backward_kernel, types, constants, launch

    of_embedding = {"sorted_pointer": "*i32", "order_pointer": "*i64", "partial_pointer": "*fp32"}
    of_embedding |= {"gradient_pointer": "*bf16", "table_pointer": "*bf16", "places": "i32", "width": "i32"}
    spans = {"SPAN": embedding.SPAN, "BLOCK": embedding.BLOCK}

    def biases_of(name: str, kind: str | None) -> Any:
        kernel = bias_gradients.write_and_sum_kernel
        constants = {"KIND": kind, "ROWS": bias_gradients.ROWS, "BLOCK": bias_gradients.BLOCK}
        constants |= {"inputs_pointer": None} if kind is None else {}
        known = dict.fromkeys(("rows", "width", "pitch", "chunk_rows"), "i32") | {"partial_pointer": "*fp32"}
        types = {name: known.get(name, "*bf16") for name in kernel.arg_names if name not in constants}
        return f"biases_{name}", kernel, types, constants, {"num_warps": 4}

    def split_options(tile: lora_grad.Tile, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
        constants = tile.launch_options(rank)
        launch = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
        return constants, launch

    def lora_mlp(name: str, kernel: Any, signature: dict[str, str], tile: lora_grad.Tile, rank: int) -> Any:
        constants, launch = split_options(tile, rank)
        return f"lora_mlp_{name}_{rank}", kernel, signature, constants | {"KIND": "gelu_tanh", "PARTS": 2}, launch

    def narrow_of(rank: int, columns: int = 2048) -> Any:
        constants, launch = split_options(lora_grad.choose_tile(rank, columns), rank)
        name = f"narrow_products_{rank}" + ("_wide" if columns > 2048 else "")
        return name, lora_grad.lora_gradients_kernel, narrow, constants, launch

    def update_of(rank: int) -> Any:
        constants, launch = split_options(narrow_updates.TILE, rank)
        kernel = narrow_updates.lora_update_kernel
        return f"narrow_update_{rank}", kernel, update, constants | {"HAS_START": True}, launch

    update = {f"{name}_pointer": "*bf16" for name in ("low", "lora_b", "start", "out")} | {"scale": "fp32"}
    sizes = "rows columns blocks low_stride start_stride second_column third_column second_block third_block"
    update |= dict.fromkeys(sizes.split(), "i32")
    tile = lora_gated_mlp.backward_tile(divmod(capability, 10))
    summed = {"partial_pointer": "*fp32", "factors_pointer": "*fp32", "scale": "fp32"}
    summed |= {"sum_pointer": "*bf16", "scaled_pointer": "*bf16"}
    summed |= dict.fromkeys(("pieces", "size", "second", "third", "width"), "i32")
    sort = {"experts_pointer": "*i64", "kept_pointer": "*i1", **dict.fromkeys(("size", "experts", "blocks"), "i32")}
    sort |= {f"{name}_pointer": "*i32" for name in ("counts", "sums", "order", "places")}
    sent = {"rows_pointer": "*bf16", "targets_pointer": "*i32", "addresses_pointer": "*i64"}
    sent |= {"first_pointer": "*fp32", "second_pointer": "*i32"}
    sent |= dict.fromkeys(("offset", "first_offset", "second_offset", "third_offset"), "i32")
    sent |= dict.fromkeys(("capacity", "rows", "width"), "i32")
    sending = {"COPIES": 2, "EXTRAS": 2, "third_pointer": None, "SEGMENTS": 64, "BLOCK": 1024}
    sorting = {"HAS_KEPT": True, "BLOCK": counting_sort.BLOCK}
    from stoker.kernels.attention.flash.hopper import documents

    of_documents = dict.fromkeys(("cu_seqlens", "begins", "ends", "bounds", "order"), "*i32")
    of_documents = {f"{name}_pointer": kind for name, kind in of_documents.items()}
    of_documents |= dict.fromkeys(("entries", "rows", "steps", "order_width", "pairs", "together", "programs"), "i32")
    dealt = {"TILE": 128, "COLUMNS": 128, "TILES": 1024, "BY_KEYS": False}
    return [
        ("document_bounds", documents.row_bounds, of_documents, {"ROWS": documents.ROWS}, {"num_warps": 4}),
        ("document_tiles", documents.deal_tiles, of_documents, dealt, {"num_warps": 4}),
        ("count_assignments", counting_sort.count_kernel, sort, sorting | {"BINS": 256}, {"num_warps": 4}),
        ("place_assignments", counting_sort.place_kernel, sort, sorting, {"num_warps": 4}),
        ("send_rows", send_kernel, sent, sending, {"num_warps": 4}),
        *(
            norm_of(width, again, centered)
            for width in (256, 1024, norm_residual.MAX_WIDTH)
            for again in (False, True)
            for centered in (False, True)
        ),
        ("embedding_sum", embedding.sum_spans_kernel, of_embedding, spans, {"num_warps": 4}),
        (
            "embedding_add",
            embedding.add_spans_kernel,
            of_embedding,
            spans | {"SPANS": embedding.SPANS},
            {"num_warps": 8},
        ),
        biases_of("activation", "gelu_tanh"),
        biases_of("join", None),
        narrow_of(16, 8192),
        *(of(rank) for of in (narrow_of, update_of) for rank in (16, lora_grad.MAX_RANK)),
        (
            "scaled_sum",
            lora_grad.sum_kernel,
            summed,
            {"FACTORS": True, "PARTS": 3, "PIECES": 32, "BLOCK": 128},
            {"num_warps": 4},
        ),
        *(
            lora_mlp(*which, rank)
            for rank in (16, lora_gated_mlp.MAX_RANK)
            for which in (
                ("forward", lora_gated_mlp.forward_kernel, lora_forward, lora_gated_mlp.forward_tile(rank)),
                ("backward", lora_gated_mlp.backward_kernel, lora_backward, tile),
            )
        ),
        *(
            (
                f"rotary_split{'_backward' * backward}",
                fused_qkv_rope_kernel,
                parts | angles | strides,
                heads | {"INTERLEAVED": False, "BACKWARD": backward},
                options,
            )
            for backward in (False, True)
        ),
        ("gated_forward", _forward_kernel, gated_forward, {"BLOCK": 1024, "KIND": "gelu"}, options),
        ("gated_backward", _backward_kernel, gated_backward, gated | {"WITH_PRODUCT": False, **no_product}, options),
        ("gated_projection", _backward_kernel, gated_projection, gated | {"WITH_PRODUCT": True}, options),
        ("dropout", _dropout_kernel, dropout, {**dropout_tile, "HAS_RESIDUAL": True, "HAS_FIRST": True}, options),
        ("scale", scale_kernel, scaled_in_place, {"BLOCK": 2048}, {"num_warps": 8}),
        ("sum", sum_over_ranks_kernel, over_ranks, {"RANK": 1, "RANKS": 8, "BLOCK": 4096}, {"num_warps": 8}),
        *(
            (
                f"adamw{'_aligned' * aligned}",
                _adamw_kernel,
                adamw,
                arrays | {"SEPARATE_MAIN": True, "ALIGNED": aligned, "BLOCK": 1024},
                options,
            )
            for aligned in (False, True)
        ),
        *(
            (
                f"sum_of_squares{'_aligned' * aligned}",
                sum_of_squares.sum_of_squares_kernel,
                table | {"partial_pointer": "*fp32"},
                {"DTYPE": bf16, "ALIGNED": aligned, "BLOCK": sum_of_squares.BLOCK},
                options | {"num_warps": 8},
            )
            for aligned in (False, True)
        ),
        *(
            (
                name,
                _loss_and_gradient_kernel,
                {argument: kind for argument, kind in loss.items() if argument != absent},
                {"WITH_GRADIENT": True, "SMOOTHED": smoothed, "CAPPED": capped, **loss_blocks[aligned], absent: None}
                | dict.fromkeys(("WEIGHTED", "Z_LOSS"), per_token)
                | {"DIVIDED": not per_token},
                loss_launches[aligned],
            )
            for name, smoothed, capped, per_token in (
                ("cross_entropy", False, False, False),
                ("cross_entropy_smoothed", True, False, False),
                ("cross_entropy_capped", False, True, False),
                ("cross_entropy_per_token_with_z_loss", False, False, True),
                ("unaligned_cross_entropy", False, False, False),
                ("unaligned_cross_entropy_smoothed", True, False, False),
            )
            for aligned in (not name.startswith("unaligned"),)
            for absent in ("denominator_pointer" if per_token else "row_weights_pointer",)
        ),
        *(
            (name, kernel, types, {"SMOOTHED": True, "CAPPED": True, **loss_blocks[True]}, loss_launches[True])
            for name, kernel, types in (
                ("vocabulary_part_statistics", _statistics_kernel, statistics),
                ("vocabulary_part_gradient", _part_gradient_kernel, part),
            )
        ),
    ]


def _cuobjdump(cubin: bytes, option: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout


def disassembly(cubin: bytes) -> str:
    """Return the machine instructions of a compiled kernel."""
    return _cuobjdump(cubin, "-sass")


def resources(cubin: bytes) -> dict[str, int]:
    """Return registers, stack and spilled bytes of a compiled kernel, as reported by cuobjdump."""
    usage = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", _cuobjdump(cubin, "-res-usage"))}
    return {"registers": usage["REG"], "stack": usage["STACK"], "local": usage["LOCAL"]}


def compile_kernel(
    kernel: Any,
    type_of: Callable[[str], str],
    constants: dict[str, Any],
    multiples: Callable[[str], bool],
    capability: int,
    options: dict[str, Any],
) -> tuple[dict[str, Any], str]:
    """Compile a kernel with addresses that are divisible by 16; return what it takes, and its PTX.

    `before_wait` counts the accesses to global memory before a PDL kernel waits for the previous one.

    Args:
        kernel: function with Triton's decorator.
        type_of: type of an argument that is no constant.
        constants: values of the constant arguments.
        multiples: True for strides and lengths that are divisible by 16 in usual launches.
        capability: compute capability, such as 90.
        options: options of the launch.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {name: "constexpr" if name in constants else type_of(name) for name in kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(types.items())
        if kind.startswith("*") or (kind != "constexpr" and multiples(name))
    }
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=aligned)
    program = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    row = {"shared": program.metadata.shared, "triton": triton.__version__}
    before, waits, _ = disassembly(program.asm["cubin"]).partition("ACQBULK")  # PTX may hold it behind other blocks
    row["before_wait"] = len(re.findall(r"\b(?:LDG|LDGSTS|STG|ATOMG|RED)\b", before)) if waits else None
    return resources(program.asm["cubin"]) | row, program.asm["ptx"]


def compiled(capabilities: Sequence[int] = CAPABILITIES, only: str = "") -> list[dict[str, Any]]:
    """Compile all variants, or `only` one, and return their rows."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    rows: list[dict[str, Any]] = []
    for capability in capabilities:
        for name, kernel, signature, constants, options in cases(capability):
            if only not in ("", name):
                continue
            order = {p: signature.get(p, "constexpr") for p in kernel.arg_names}
            # divisible by 16 as in launches with usual widths; other kernels meet their budgets for any width
            multiples = [n for n, p in enumerate(order) if signature.get(p, "fp32") != "fp32"]
            attributes = {
                (n,): [["tt.divisibility", 16]]
                for n in multiples
                if name.startswith(
                    ("layer_norm", "rms_norm", "lora", "narrow", "biases", "send", "embedding", "cross", "vocabulary")
                )
            }
            source = ASTSource(fn=kernel, signature=order, constexprs=constants, attrs=attributes)
            program = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            row = {"kernel": name, "capability": capability, "triton": triton.__version__}
            row["narrow_stores"] = len(re.findall(r"st\.global\.b(?:8|16)\b", program.asm["ptx"]))
            rows.append(row | resources(program.asm["cubin"]) | {"shared": program.metadata.shared})
    return rows


if __name__ == "__main__":
    print(*map(json.dumps, compiled()), sep="\n")
