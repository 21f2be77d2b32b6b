from pathlib import Path

import gguf
import pytest

from outrider.lm.gguf_once import gguf_read_once


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    paths = [str(tmp_path / name) for name in ("a.gguf", "b.gguf")]
    for path in paths:
        writer = gguf.GGUFWriter(path, "llama")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
    return paths


def test_a_file_is_read_once_and_another_one_anew(files: list[str]) -> None:
    with gguf_read_once():
        first = gguf.GGUFReader(files[0])
        assert gguf.GGUFReader(files[0]) is first
        assert gguf.GGUFReader(files[1]) is not first


def test_afterwards_nothing_is_kept_not_even_after_an_error(files: list[str]) -> None:
    before = gguf.GGUFReader, gguf.get_tensor_name_map
    with pytest.raises(FileNotFoundError), gguf_read_once():
        gguf.GGUFReader("no such file")
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == before
    assert gguf.GGUFReader(files[0]) is not gguf.GGUFReader(files[0])
