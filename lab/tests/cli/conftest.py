"""The command lines in this process."""

from command_fixtures import _one_worker, retrieval_run, text_file, text_run  # noqa: F401  # fixtures
