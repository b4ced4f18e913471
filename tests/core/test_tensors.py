"""The digest of a tensor is that of its bytes, and the one that everybody else would work out."""

from __future__ import annotations

import torch

from mergeway.core.tensors import as_bytes, begin_digest, digest_tensor

# From the test vectors that the authors of BLAKE3 publish: no byte, and the bytes 0, 1, 2.
EMPTY = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
THREE = "e1be4d7a8ab5560aa4199eea339849ba8e293d55ca0a81006726d184519e647f"


def test_published_digests():
    assert digest_tensor(torch.zeros(0)) == EMPTY
    assert digest_tensor(torch.arange(3, dtype=torch.uint8)) == THREE


def test_blocks_give_the_digest_of_the_whole():
    tensor = torch.arange(100_000, dtype=torch.float32)
    digest = begin_digest()
    for block in tensor.to(torch.bfloat16).split(777):
        digest.update(as_bytes(block))
    assert digest.hexdigest() == digest_tensor(tensor.to(torch.bfloat16))
