"""How far a reader has to go from a text to the maps that the page shows."""

from diff_transformer.explorer import ExploredModel, Explorer, Side, WordVocabulary
from explored_models import make
from journeys import files_entered

TEXT = "w3 w7 w1 w12"


def test_from_a_text_to_the_map_of_a_head() -> None:
    words = WordVocabulary([f"w{number}" for number in range(29)])
    explorer = Explorer(Side(ExploredModel(make("diff").float(), "tiny"), words))
    explorer.run({"text": "w1"})  # which builds and loads the kernel
    files = files_entered(lambda: explorer.head_map({"text": TEXT, "layer": 2, "head": 1}), "encode_maps")
    of_explorer = [file for file in files if file.startswith("explorer/")]
    assert of_explorer == [f"explorer/{name}.py" for name in ("explorer", "explored_model", "trace")]
    assert len(files) <= 15, files  # the model's forward pass, by the CPU kernel, is the rest
