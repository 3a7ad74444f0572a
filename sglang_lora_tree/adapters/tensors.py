"""adapter_model.safetensors or adapter_model.bin -> tensors that own their memory."""

import os
import pickle
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from sglang_lora_tree.adapters.error import AdapterError

SAFETENSORS_NAME = "adapter_model.safetensors"
BIN_NAME = "adapter_model.bin"


def find_tensor_file(folder: Path) -> Path:
    """The file PEFT itself would read: safetensors first. Raises AdapterError if there is neither."""
    for name in SAFETENSORS_NAME, BIN_NAME:
        if os.path.isfile(folder / name):
            return folder / name
    raise AdapterError(
        folder / SAFETENSORS_NAME,
        "the file",
        f"is missing, and so is {BIN_NAME}",
        "name a folder as PEFT's save_pretrained writes it (and after the download has finished)",
    )


def list_names(file: Path) -> list[str] | None:
    """Tensor names from the header alone, None where there is none (.bin).

    A file with foreign names, such as a whole model, is so refused before its gigabytes are read.
    """
    if file.name != SAFETENSORS_NAME:
        return None
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise _unreadable(file, error) from error


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """All tensors of the file, on the CPU, contiguous, each owning its memory, in the file's dtypes.

    Raises AdapterError for a truncated or foreign file.
    """
    if file.name == SAFETENSORS_NAME:
        try:
            # Bytes, not a memory map: should the file shrink under us, a map would kill the process with a bus error.
            tensors = safetensors.torch.load(file.read_bytes())
        except (safetensors.SafetensorError, OSError, ValueError, KeyError) as error:
            raise _unreadable(file, error) from error
    else:
        try:
            tensors = torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise _unreadable(file, "no tensors only, or damaged") from error
        except Exception as error:  # torch.load has no error class of its own
            raise _unreadable(file, error) from error
    return own_tensors(tensors, file)


def own_tensors(tensors: object, file: object) -> dict[str, torch.Tensor]:
    """Checks that this is a dict of plain tensors; copies only those that are views, not contiguous, or elsewhere."""
    if not isinstance(tensors, dict) or not all(isinstance(name, str) for name in tensors):
        raise _unreadable(file, f"it holds a {type(tensors).__name__}, not tensors by name")
    return {name: _own(name, tensor, file) for name, tensor in tensors.items()}


def _own(name: str, tensor: object, file: object) -> torch.Tensor:
    cure = "save plain dense tensors (PEFT's save_pretrained)"
    if not isinstance(tensor, torch.Tensor):
        raise AdapterError(file, name, f"is a {type(tensor).__name__}, not a tensor", cure)
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
        raise AdapterError(file, name, "is not a dense tensor with data", cure)
    # A view with stride 0 claims any size in a few bytes; a copy of it would not fit into memory.
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise AdapterError(file, name, f"claims shape {tuple(tensor.shape)} without the data for it", cure)
    tensor = tensor.detach().cpu().contiguous()
    # A view keeps all that it is a view of alive.
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _unreadable(file: object, why: object) -> AdapterError:
    return AdapterError(
        file, "the file", f"is truncated or not a file of tensors ({why})", "download or save the adapter again"
    )
