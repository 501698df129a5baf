"""The names of the files and folders in the directory of a run."""

from __future__ import annotations

CONFIG_NAME = "run.json"
RECORD_NAME = "record.json"
PROGRESS_NAME = "progress.jsonl"
# The names of the model's files, written before they are moved into place.
MODEL_FILES_NAME = "model-files.json"

# Folders.
LOGS_NAME = "logs"
CHECKPOINTS_NAME = "checkpoints"
# What --trace leaves, in files of each rank.
TRACES_NAME = "traces"
# What earlier starts of a run left, each in a folder with its number.
ATTEMPTS_NAME = "attempts"
