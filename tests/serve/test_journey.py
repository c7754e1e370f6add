"""How far a reader has to go from a request to the model."""

from journeys import files_entered
from running_server import client_of, new_served, running


def test_from_a_request_to_the_models_forward() -> None:
    def complete() -> None:
        with running(new_served()) as url, client_of(url) as client:
            client.completions.create(model="tiny", prompt="to be", temperature=0, max_tokens=2)

    files = files_entered(complete, "forward", since="_reply")
    ours = [file for file in files if not file.startswith("model/") and file != "attention_types.py"]
    assert len(ours) <= 4, ours
    assert "model/modeling.py" in files
