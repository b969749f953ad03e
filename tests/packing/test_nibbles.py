"""Two or four codes in a byte, the first in the lowest bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.errors import ConfigError
from kvlab.packing import pack, unpack


def codes(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def test_nibble_order_the_first_code_is_in_the_low_nibble() -> None:
    """Quark 30: 0 to 7 become 0x10 0x32 0x54 0x76."""
    assert pack(codes(*range(8)), 4).tolist() == [0x10, 0x32, 0x54, 0x76]
    assert pack(codes(1, 2, 3, 0), 2).tolist() == [0b00_11_10_01]


def test_a_shift_never_overflows_all_256_pairs_come_back() -> None:
    """keras 22338: the high code of a pair, shifted by four bits, must not run over a signed byte."""
    pairs = torch.cartesian_prod(torch.arange(16), torch.arange(16)).to(torch.uint8)
    packed = pack(pairs, 4)
    assert packed.shape == (256, 1)
    assert packed.unique().numel() == 256
    assert torch.equal(unpack(packed, 4), pairs)


@settings(max_examples=60)
@given(st.data(), st.sampled_from([2, 4, 8]))
def test_what_is_packed_comes_back(data: st.DataObject, bits: int) -> None:
    rows, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6)) * 8 // bits
    seed = data.draw(st.integers(0, 2**16))
    given_ = torch.randint(2**bits, (2, rows, width), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    packed = pack(given_, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (2, rows, width * bits // 8)
    assert torch.equal(unpack(packed, bits), given_)


def test_packing_leaves_what_it_is_given_alone() -> None:
    given_ = codes(15, 15, 15, 15)
    pack(given_, 4)
    assert given_.tolist() == [15] * 4


@pytest.mark.parametrize(("width", "bits"), [(3, 4), (6, 2), (1, 4)])
def test_codes_that_do_not_fill_whole_bytes_are_refused(width: int, bits: int) -> None:
    with pytest.raises(ConfigError, match=f"{width} codes of {bits} bits .* multiple of {8 // bits}"):
        pack(codes(*[0] * width), bits)


@pytest.mark.parametrize("bits", [0, 1, 3, 5, 16])
def test_other_widths_are_refused(bits: int) -> None:
    for work in (pack, unpack):
        with pytest.raises(ConfigError, match=f"bits is {bits}; codes have 2, 4 or 8"):
            work(codes(0, 0, 0, 0), bits)
