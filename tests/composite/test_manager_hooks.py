"""Names that adapters may have; the rest of the manager is what the live tests ask."""

import pytest

from sglang_lora_tree.composite.manager_hooks import check_name


@pytest.mark.parametrize("name", ["math", "org:math", 'odd: name, "quoted" {and} more/less', "数学", "0"])
def test_any_printable_name(name):
    check_name(name, "llama")


@pytest.mark.parametrize("name", ["", " ", " math", "math\n", "a\nb", "a\x00b", "\u202emath", "\ud800"])
def test_a_name_that_no_request_could_write_is_refused(name):
    with pytest.raises(ValueError, match=r"printable text.*choose another"):
        check_name(name, "llama")


def test_a_name_is_bounded():
    """It stands in messages, in metrics and in every list of models."""
    check_name("a" * 256, "llama")
    with pytest.raises(ValueError, match=r"^adapter 'a{40}'\.\.\.: its name has 257 characters; choose one of 256 at most$"):
        check_name("a" * 257, "llama")


def test_the_base_models_name_is_refused():
    with pytest.raises(ValueError, match="name of the base model"):
        check_name("llama", "llama")
