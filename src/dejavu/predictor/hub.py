"""Plans on the Hugging Face Hub: a repository of the two files, like a small model."""

from __future__ import annotations

import os
from pathlib import Path

from dejavu.errors import PlanError

FILES = ("plan.json", "predictors.safetensors")


def pull_plan(repo_id: str) -> Path:
    """Folder of a plan's cached copy, downloaded if it is not there.

    Raises PlanError for what is neither a folder nor a repository that can be had.
    """
    from huggingface_hub import snapshot_download

    from dejavu.weights.hub import hub_endpoint, is_hub_id, refusal

    if not is_hub_id(repo_id):
        raise PlanError(
            f"plan {repo_id!r}: there is no such folder, and it cannot be the id of a repository "
            "on the Hugging Face Hub, which looks like 'org/name'"
        )
    try:
        folder = Path(
            snapshot_download(repo_id, endpoint=hub_endpoint(), allow_patterns=list(FILES))
        )
    except Exception as error:  # network libraries have types of their own
        raise PlanError(
            f"plan {repo_id!r}: there is no such folder, nor could it be had from the Hugging Face "
            f"Hub: {refusal(error)}. Plans are made by `dejavu prepare MODEL --out FOLDER`"
        ) from error
    for name in FILES:
        if not (folder / name).is_file():
            raise PlanError(f"{repo_id} on the Hub is no plan: it lacks {name}")
    return folder


def push_plan(folder: str | os.PathLike[str], repo_id: str, *, private: bool = False) -> str:
    """Upload a plan folder (creating the repository if needed); returns its URL.

    Raises PlanError for a folder that is no readable plan, or an upload that is refused.
    """
    from huggingface_hub import HfApi

    from dejavu.predictor.plan import load_plan
    from dejavu.weights.hub import hub_endpoint

    plan = load_plan(folder)
    api = HfApi(endpoint=hub_endpoint())
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=Path(folder),
            allow_patterns=list(FILES),
            commit_message=f"Sparsity plan for {plan.base.name}",
        )
    except Exception as error:
        raise PlanError(
            f"uploading {folder} to {repo_id} failed ({type(error).__name__}: "
            f"{str(error).strip()}); log in with `hf auth login` or set HF_TOKEN"
        ) from error
    return str(commit.commit_url)
