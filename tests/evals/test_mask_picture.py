"""The picture shows the mask that training uses, cell by cell."""

import numpy as np
import pytest

from wedlm_jax.diffusion.dual_stream import visibility
from wedlm_jax.evals import mask_picture


@pytest.fixture(scope="module")
def painted():
    batch = mask_picture.example()
    visible = np.asarray(visibility(batch.segment_ids, block_size=mask_picture.BLOCK_SIZE)[0])
    return batch, visible, mask_picture.classify(batch, visible)


def test_a_cell_is_coloured_exactly_where_a_real_query_sees_a_real_key(painted):
    batch, visible, kind = painted
    real = np.tile(np.asarray(batch.segment_ids[0]) > 0, 2)
    assert np.array_equal(kind >= mask_picture.MEMORY, visible & real[:, None] & real[None, :])


def test_every_mask_sees_all_observed_tokens_of_its_block_and_no_clean_copy_of_it(painted):
    batch, _, kind = painted
    length, J = batch.segment_ids.shape[1], mask_picture.BLOCK_SIZE
    masked = np.asarray(batch.masked[0])
    assert masked.any()
    for query in np.flatnonzero(masked):
        block = slice(length + (query - length) // J * J, length + (query - length) // J * J + J)
        real = np.asarray(batch.segment_ids[0])[block.start - length : block.stop - length] > 0
        assert np.all(kind[query, block][real & ~masked[block]] == mask_picture.OBSERVED)
        assert np.all(kind[query, block.start - length : length] < mask_picture.MEMORY)


def test_the_command_writes_a_png(tmp_path, monkeypatch, capsys):
    path = tmp_path / "new" / "mask.png"
    monkeypatch.setattr("sys.argv", ["mask_picture", str(path)])
    mask_picture.main()
    assert path.read_bytes().startswith(b"\x89PNG")
    assert str(path) in capsys.readouterr().out


def test_the_command_without_a_path_says_what_to_type(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["mask_picture"])
    with pytest.raises(SystemExit) as exit:
        mask_picture.main()
    assert exit.value.code == 2
    assert "python -m wedlm_jax.evals.mask_picture docs/dual_stream_mask.png" in capsys.readouterr().err
