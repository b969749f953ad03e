"""Attention to keys in blocks against a softmax in float64 over the keys that each query may see."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvlab import kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: Epsilon of what comes out; the inputs are exact and the sums are float32.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}

pytestmark = pytest.mark.usefixtures("compiled_kernels")


class Case:
    """Requests whose blocks lie anywhere; what no query may read is poisoned: slots by NaN, table entries by -1."""

    def __init__(
        self, lengths: list[int], *, heads: tuple[int, int] = (3, 9), head_dim: int = 64, block_size: int = 16,
        window: int = 0, dtype: torch.dtype = torch.float32, seed: int = 0,
    ) -> None:  # fmt: skip
        random = torch.Generator().manual_seed(seed)
        n_kv_head, n_head = heads
        self.block_size, self.window, requests = block_size, window, len(lengths)
        blocks = max(1, *(-(-length // block_size) for length in lengths)) + 2
        self.lengths = torch.tensor(lengths)
        self.rows = torch.randperm(requests, generator=random)
        self.tables = torch.randperm(requests * blocks, generator=random).view(requests, blocks)
        shape = (n_kv_head, requests * blocks * block_size, head_dim)
        self.keys = torch.randn(shape, generator=random).to(dtype)
        self.values = torch.randn(shape, generator=random).to(dtype)
        self.q = torch.randn(requests, n_head, head_dim, generator=random).to(dtype)
        self._poison()

    def _poison(self) -> None:
        slots, entries = (
            torch.ones(self.keys.shape[1], dtype=torch.bool),
            torch.ones_like(self.tables, dtype=torch.bool),
        )
        for query in range(len(self.q)):
            slots[self.slots(query)] = False
            entries[self.rows[query], self.positions(query) // self.block_size] = False
        self.keys[:, slots], self.values[:, slots] = torch.nan, torch.nan
        self.tables[entries] = -1
        self.rows[self.lengths == 0] = -1

    def positions(self, query: int) -> Tensor:
        length = int(self.lengths[query])
        return torch.arange(max(0, length - self.window) if self.window else 0, length)

    def slots(self, query: int) -> Tensor:
        positions = self.positions(query)
        blocks = self.tables[self.rows[query], positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size

    def oracle(self) -> Tensor:
        group, out = self.q.shape[1] // len(self.keys), torch.zeros(self.q.shape, dtype=torch.float64)
        for query in range(len(self.q)):
            if self.lengths[query]:
                keys, values = (
                    t[:, self.slots(query)].double().repeat_interleave(group, 0) for t in (self.keys, self.values)
                )
                scores = torch.einsum("hd,hkd->hk", self.q[query].double(), keys) / self.q.shape[2] ** 0.5
                out[query] = torch.einsum("hk,hkd->hd", torch.softmax(scores, -1), values)
        return out

    def operands(self) -> dict[str, object]:
        return {
            "q": self.q, "keys": self.keys, "values": self.values, "tables": self.tables, "rows": self.rows,
            "lengths": self.lengths, "block_size": self.block_size, "window": self.window,
        }  # fmt: skip

    def attend(self) -> Tensor:
        return kernels.paged_attention(**self.operands())  # type: ignore[arg-type]

    def check(self) -> None:
        got, want = self.attend(), self.oracle()
        assert got.dtype == self.q.dtype
        assert got.is_contiguous()
        off = (got.double() - want).abs()
        assert (off <= TOLERANCE[got.dtype] * want.abs() + 2e-6).all(), off.max()


@given(
    lengths=st.lists(st.one_of(st.integers(0, 40), st.integers(250, 520)), min_size=1, max_size=5),
    n_kv_head=st.integers(1, 3), group=st.sampled_from([1, 2, 3, 4, 5, 8]), head_dim=st.integers(1, 16),
    block_size=st.sampled_from([1, 3, 16, 32]), window=st.sampled_from([0, 1, 7, 16, 255, 257]),
    dtype=st.sampled_from(DTYPES), seed=st.integers(0, 9),
)  # fmt: skip
@settings(max_examples=150)
def test_any_requests_get_the_softmax_over_what_they_see(
    lengths: list[int], n_kv_head: int, group: int, head_dim: int, block_size: int, window: int, dtype: torch.dtype,
    seed: int,
) -> None:  # fmt: skip
    """Poison is all around: a slot or a table entry too many gives NaN or an error."""
    Case(
        lengths, heads=(n_kv_head, n_kv_head * group), head_dim=8 * head_dim, block_size=block_size, window=window,
        dtype=dtype, seed=seed,
    ).check()  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [8, 16, 24, 64, 80, 128])
def test_every_dtype_group_and_width(dtype: torch.dtype, group: int, head_dim: int) -> None:
    Case([0, 1, 15, 16, 17, 700], heads=(2, 2 * group), head_dim=head_dim, dtype=dtype).check()


@pytest.mark.parametrize("length", [255, 256, 257, 511, 512, 513, 2048])
def test_lengths_around_the_edges_of_pieces(length: int) -> None:
    Case([length]).check()
    Case([length + 100], window=length).check()


def test_a_request_gets_the_same_alone_beside_others_and_on_any_number_of_threads() -> None:
    """Bit for bit: pieces are cut where the request says, not where threads do."""
    case = Case([1500, 3, 100, 777], dtype=torch.bfloat16)
    together, threads = case.attend(), torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(case.attend(), together)
    finally:
        torch.set_num_threads(threads)
    operands = case.operands()
    for query in range(4):
        one = slice(query, query + 1)
        alone = operands | {"q": case.q[one], "rows": case.rows[one], "lengths": case.lengths[one]}
        assert torch.equal(kernels.paged_attention(**alone), together[one])  # type: ignore[arg-type]


def test_several_queries_read_one_table() -> None:
    """A chunk of a prompt: each query sees one key more than the one before it."""
    case = Case([64])
    case.q, case.rows = torch.randn(8, 9, 64), torch.zeros(8, dtype=torch.long)
    case.lengths = torch.arange(57, 65)
    case.check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_are_read_where_they_lie(dtype: torch.dtype) -> None:
    """Queries out of a QKV product, keys and values out of one larger tensor, tables out of a wider one."""
    case = Case([33, 300], dtype=dtype)
    projected = torch.randn(2, 15 * 64).to(dtype)
    projected[:, : 9 * 64] = case.q.flatten(1)
    case.q = projected[:, : 9 * 64].view(2, 9, 64)
    held = torch.full((2, 3, case.keys.shape[1], 72), torch.nan, dtype=dtype).transpose(1, 2).contiguous()
    held = held.transpose(1, 2)
    held[0, :, :, :64], held[1, :, :, :64] = case.keys, case.values
    case.keys, case.values = held[0, :, :, :64], held[1, :, :, :64]
    wider = torch.full((2, case.tables.shape[1] + 3), -1)
    wider[:, :-3] = case.tables
    case.tables = wider[:, :-3]
    assert not any(t.is_contiguous() for t in (case.q, case.keys, case.values, case.tables))
    case.check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1e-4, 60.0])
def test_flat_and_extreme_scores(dtype: torch.dtype, scale: float) -> None:
    """Scores of some thousands overflow a plain exponential; the largest key wins everything."""
    case = Case([40, 600], dtype=dtype)
    case.q = (case.q * scale).to(dtype)
    got, want = case.attend().double(), case.oracle()
    torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=1e-3 if scale > 1 else 2e-6)


def test_large_scores_are_shifted_not_overflowed() -> None:
    """Float16 scores beyond 65,504 are sums in float32."""
    case = Case([20], heads=(1, 1), dtype=torch.float16)
    case.q, case.keys[:] = torch.full((1, 1, 64), 1000.0).half(), 1000.0
    want = case.values[:, case.slots(0)].double().mean(1)
    torch.testing.assert_close(case.attend()[0].double(), want, rtol=2**-10, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_that_is_seen_comes_out_in_its_own_query_and_head(dtype: torch.dtype) -> None:
    case = Case([300, 20], dtype=dtype)
    case.keys[1, case.slots(0)[270]] = torch.nan
    got = case.attend()
    assert got[0, 3:6].isnan().all()
    assert torch.isfinite(got[0, :3]).all()
    assert torch.isfinite(got[0, 6:]).all()
    assert torch.isfinite(got[1]).all()


def test_padding_and_no_queries() -> None:
    case = Case([0, 0, 5])
    got = case.attend()
    assert torch.equal(got[:2], torch.zeros(2, 9, 64))
    assert got[2].abs().sum() > 0
    empty = case.operands() | {"q": case.q[:0], "rows": case.rows[:0], "lengths": case.lengths[:0]}
    assert kernels.paged_attention(**empty).shape == (0, 9, 64)  # type: ignore[arg-type]


GUARDED = '''
import ctypes, mmap, torch
from kvlab import kernels

assert kernels.enable()
libc, page, held = ctypes.CDLL(None), mmap.PAGESIZE, []


def guarded(tensor):
    """A copy that ends where memory ends: reading one byte behind it kills the process."""
    size = tensor.nbytes
    room = mmap.mmap(-1, -(-size // page) * page + page)
    end = len(room) - page
    at = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(room, end)))
    assert libc.mprotect(at, page, 0) == 0
    held.append(room)
    made = torch.frombuffer(room, dtype=tensor.dtype, count=tensor.numel(), offset=end - size)
    return made.view_as(tensor).copy_(tensor)


for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for head_dim in (8, 24, 64, 96):
        for length in (1, 15, 16, 17, 40, 300):
            keys, values = (guarded(torch.randn(1, length, head_dim).to(dtype)) for _ in range(2))
            q = guarded(torch.randn(1, 2, head_dim).to(dtype))
            tables = guarded(torch.arange(length)[None])
            got = kernels.paged_attention(q, keys, values, tables, torch.tensor([0]), torch.tensor([length]), 1)
            assert torch.isfinite(got).all()
print("alive")
'''


def test_nothing_is_read_behind_the_last_key(compiled_kernels: Path) -> None:
    """Poison shows what enters a result; this shows what is read and thrown away."""
    done = subprocess.run(
        [sys.executable, "-c", GUARDED], capture_output=True, text=True, check=False,
        env=os.environ | {"KVLAB_CACHE": str(compiled_kernels)},
    )  # fmt: skip
    assert done.stdout == "alive\n", (done.returncode, done.stderr)


def changed(change: str) -> dict[str, object]:
    case = Case([20, 30], heads=(2, 4), head_dim=16)
    q, keys, rows, lengths = case.q, case.keys, case.rows, case.lengths
    blocks = keys.shape[1] // 16

    def entry(request: Tensor, at: int, block: int) -> Tensor:
        tables = case.tables.clone()
        tables[request, at] = block
        return tables

    changes: dict[str, dict[str, object]] = {
        "float64": {"q": q.double()},
        "keys of another dtype": {"keys": keys.bfloat16()},
        "values of another dtype": {"values": keys.half()},
        "two dimensions": {"q": q[0]},
        "keys of two dimensions": {"keys": keys[0]},
        "fewer values": {"values": keys[:, :16]},
        "another width": {"q": torch.randn(2, 4, 8)},
        "a width of 12": {"q": q[..., :12], "keys": keys[..., :12], "values": keys[..., :12]},
        "no width": {"q": q[..., :0], "keys": keys[..., :0], "values": keys[..., :0]},
        "heads that do not divide": {"q": q[:, :3]},
        "no KV heads": {"keys": keys[:0], "values": keys[:0]},
        "queries with gaps": {"q": torch.randn(2, 4, 32)[..., ::2]},
        "keys with gaps": {"keys": torch.randn(2, 16, keys.shape[1]).transpose(1, 2)},
        "values with gaps": {"values": torch.randn(2, 16, keys.shape[1]).transpose(1, 2)},
        "tables of int32": {"tables": case.tables.int()},
        "tables with gaps": {"tables": case.tables.T.contiguous().T},
        "tables of one dimension": {"tables": case.tables[0]},
        "rows of int32": {"rows": rows.int()},
        "lengths in float": {"lengths": lengths.float()},
        "lengths with gaps": {"lengths": torch.ones(4, dtype=torch.long)[::2]},
        "fewer rows": {"rows": rows[:1]},
        "fewer lengths": {"lengths": lengths[:1]},
        "no block size": {"block_size": 0},
        "a negative window": {"window": -1},
        "a negative length": {"lengths": torch.tensor([20, -1])},
        "a length beyond the table": {"lengths": torch.tensor([20, 65])},
        "a row too many": {"rows": torch.tensor([0, 2])},
        "a negative row": {"rows": torch.tensor([-1, 1])},
        "a block too many": {"tables": entry(rows[1], 1, blocks)},
        "a negative block": {"tables": entry(rows[0], 0, -1)},
        "a block far away": {"tables": entry(rows[1], 0, 2**62)},
        "blocks larger than all slots": {"block_size": 4096},
    }
    return case.operands() | changes[change]


BAD = {
    "float64": "q is Double; it must be float32, float16 or bfloat16",
    "keys of another dtype": "keys is BFloat16; it must be Float",
    "values of another dtype": "values is Half; it must be Float",
    "two dimensions": "q has 2 dimensions; it must have 3",
    "keys of two dimensions": "keys has 2 dimensions",
    "fewer values": r"keys are \[2, 128, 16\], values \[2, 16, 16\]; they must agree",
    "another width": "queries have 8 elements, keys 16",
    "a width of 12": "head_dim is 12; it must be a multiple of 8",
    "no width": "head_dim is 0",
    "heads that do not divide": "3 query heads do not divide among 2 KV heads",
    "no KV heads": "4 query heads do not divide among 0 KV heads",
    "queries with gaps": "q has a stride of 2 in its last dimension; it must be 1",
    "keys with gaps": "keys has a stride of 128",
    "values with gaps": "values has a stride of 128",
    "tables of int32": "tables is Int; it must be Long",
    "tables with gaps": "tables has a stride of 2",
    "tables of one dimension": "tables has 1 dimensions",
    "rows of int32": "rows is Int",
    "lengths in float": "lengths is Float",
    "lengths with gaps": "lengths has a stride of 2",
    "fewer rows": "there are 2 queries, 1 rows and 2 lengths; they must agree",
    "fewer lengths": "there are 2 queries, 2 rows and 1 lengths",
    "no block size": "block_size is 0; it must be positive",
    "a negative window": "window is -1; it must be positive, or 0 for none",
    "a negative length": "query 1 has a length of -1; the tables have room for 64 keys",
    "a length beyond the table": "query 1 has a length of 65; the tables have room for 64 keys",
    "a row too many": "query 1 reads table 2; there are 2",
    "a negative row": "query 0 reads table -1",
    "a block too many": r"query 1 reads block 8 \(entry 1 of table \d\); there are 8 blocks of 16",
    "a negative block": "query 0 reads block -1",
    "a block far away": "query 1 reads block 4611686018427387904",
    "blocks larger than all slots": "there are 0 blocks of 4096",
}


@pytest.mark.parametrize("change", BAD)
def test_bad_operands_raise(change: str) -> None:
    # By the operator itself: the shape checks of the tests would refuse some of these before it could.
    with pytest.raises(RuntimeError, match=BAD[change]):
        torch.ops.kvlab.paged_attention(*changed(change).values())


def test_steps_compiled_ahead_call_it_directly(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Exported, compiled and loaded again: the same numbers, by the C function and not through the registry."""

    class Step(torch.nn.Module):
        def forward(self, q, keys, values, tables, rows, lengths):  # type: ignore[no-untyped-def]
            return torch.ops.kvlab.paged_attention(q, keys, values, tables, rows, lengths, 16, 0) * 2

    case = Case([5, 40])
    args = tuple(list(case.operands().values())[:6])
    package = str(tmp_path_factory.mktemp("step") / "step.pt2")
    configs = {"aot_inductor.custom_ops_to_c_shims": kernels.direct_calls()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's, about itself
        exported = torch.export.export(Step(), args)
        torch._inductor.aoti_compile_and_package(exported, package_path=package, inductor_configs=configs)
    assert torch.equal(torch._inductor.aoti_load_package(package)(*args), case.attend() * 2)
