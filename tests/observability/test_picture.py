import pytest
from PIL import Image

from sglang_lora_tree.observability import picture
from tests.observability.snapshots import SnapshotMaker, random_snapshot, small_snapshot


@pytest.mark.parametrize(
    "snapshot",
    [small_snapshot(), SnapshotMaker().snapshot(), random_snapshot(8, 4, 50), random_snapshot(100, 30, 2000)],
    ids=["small", "empty", "50 nodes", "2000 nodes"],
)
def test_a_picture_of_any_tree_has_a_size_to_look_at(tmp_path, snapshot):
    picture.draw_png(snapshot, tmp_path / "tree.png", dpi=60)
    with Image.open(tmp_path / "tree.png") as image:
        width, height = image.size
    assert 600 <= width <= 1000 and height <= 60 * (picture.MAX_ROWS * picture.ROW + 3)


def test_names_with_signs_that_matplotlib_reads(tmp_path):
    maker = SnapshotMaker()
    maker.adapter(r"$\frac$ ^_ {")
    maker.adapter("$x$ on disk $", tier="disk")
    picture.draw_png(maker.snapshot(), tmp_path / "tree.png", dpi=40)


def test_boxes_do_not_overlap():
    root = picture.with_base_heading(picture._fit(picture.build(random_snapshot(8, 4, 50))))
    boxes = []
    picture._place(root, 0, 0, picture.Scale.of(root), boxes)
    for number, one in enumerate(boxes):
        for other in boxes[:number]:
            beside = one.right < other.x or other.right < one.x
            assert beside or abs(one.y - other.y) >= picture.HEIGHT, (one, other)


def test_the_base_model_keeps_its_heading_beside_more_adapters_than_are_shown(tmp_path, monkeypatch):
    maker = SnapshotMaker()
    for number in range(60):
        maker.kv(maker.adapter(f"adapter{number}", visits=1), visits=1)
    maker.kv(maker.root)
    labels = []
    draw_box = picture._draw_box
    monkeypatch.setattr(picture, "_draw_box", lambda axes, box: (labels.append(box.node.label), draw_box(axes, box)))
    picture.draw_png(maker.snapshot(), tmp_path / "tree.png", dpi=40)
    assert "base model" in labels and "12 more adapters and mixes, with their KV" in labels


def test_few_nodes_are_all_shown_and_many_are_summed_up():
    def count(snapshot):
        return sum(1 for node in picture._fit(picture.build(snapshot)).below())

    assert count(random_snapshot(8, 4, 50)) == 62
    assert count(random_snapshot(100, 30, 2000)) < 150
