"""The programs: their packages, their settings for a server on this machine, and how they are asked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.clients.installing import NpmPackage, Package, PythonPackage

MODEL = "scripted"
_CONTEXT, _OUTPUT = 65_536, 4096
_HOUR_MS = "3600000"

Files = Mapping[str, str]

_PAGE = Path(__file__).resolve().with_name("webui_page.py")
_LIBRARIES = Path(__file__).resolve().with_name("libraries")
# What brings torch along is needed for embeddings in its own process, and is not imported at the start.
_PYTHONS = ("3.12", "3.11")
_WEBUI_PACKAGE = PythonPackage("open-webui", _PYTHONS, without=("sentence-transformers", "accelerate"))
_WEBUI = {
    "WEBUI_AUTH": "False",
    "WEBUI_SECRET_KEY": "known to everybody, since there is one user",
    "ENABLE_EVALUATION_ARENA_MODELS": "False",
    "ENABLE_VERSION_UPDATE_CHECK": "False",
    "OFFLINE_MODE": "True",  # downloads nothing
    "HF_HUB_OFFLINE": "1",
    "ANONYMIZED_TELEMETRY": "False",
    "SCARF_NO_ANALYTICS": "True",
    "DO_NOT_TRACK": "True",
}


@dataclass(frozen=True)
class Program:
    """A program that talks to models.

    Attributes:
        name: as people call it.
        package: what it is installed from.
        api: the path that it sends its conversations to.
        arguments: those that ask a question; the second value says whether it continues the conversation.
        by_form: how it has its answers enforced, if it does without tools.
        environment: variables for a server at an address.
        files: settings in its home folder for a server at an address, by their paths there.
    """

    name: str
    package: Package
    api: str
    arguments: Callable[[str, bool], list[str]]
    by_form: str = ""
    environment: Callable[[str], Mapping[str, str]] = field(default=lambda _url: {})
    files: Callable[[str], Files] = field(default=lambda _url: {})


def _codex(question: str, resumes: bool) -> list[str]:
    # The script decides what is run, in a folder that is made anew; a sandbox might not work in a container.
    settings = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return ["exec", *(["resume", "--last"] if resumes else []), *settings, question]


def _codex_files(url: str) -> Files:
    text = f"""\
model = "{MODEL}"
model_provider = "edgespec"
model_context_window = {_CONTEXT}

[model_providers.edgespec]
name = "EdgeSpec"
base_url = "{url}/v1"
wire_api = "responses"
stream_idle_timeout_ms = {_HOUR_MS}
"""
    return {".codex/config.toml": text}


def _claude_environment(url: str) -> Mapping[str, str]:
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "API_TIMEOUT_MS": _HOUR_MS,
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": _HOUR_MS,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def _opencode_files(url: str) -> Files:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "EdgeSpec",
        "options": {"baseURL": f"{url}/v1", "timeout": False},
        "models": {MODEL: {"name": MODEL, "limit": {"context": _CONTEXT, "output": _OUTPUT}}},
    }
    settings: dict[str, Any] = {
        "model": f"local/{MODEL}",
        "small_model": f"local/{MODEL}",
        "provider": {"local": provider},
        "autoupdate": False,
        "share": "disabled",
    }
    return {".config/opencode/opencode.json": json.dumps(settings)}


def _cline_files(url: str) -> Files:
    own = {"provider": "openai-compatible", "apiKey": "none", "model": MODEL, "baseUrl": f"{url}/v1"}
    provider = {"settings": own, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    settings = {"version": 1, "lastUsedProvider": "openai-compatible", "modes": {}}
    settings["providers"] = {"openai-compatible": provider}
    return {".cline/data/settings/providers.json": json.dumps(settings)}


def _openai_environment(url: str) -> Mapping[str, str]:
    return {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": MODEL}


def _pi_files(url: str) -> Files:
    model = {"id": MODEL, "contextWindow": _CONTEXT, "maxTokens": _OUTPUT}
    provider = {"baseUrl": f"{url}/v1", "api": "openai-completions", "apiKey": "none", "models": [model]}
    return {".pi/agent/models.json": json.dumps({"providers": {"edgespec": provider}})}


def _continue_files(url: str) -> Files:
    text = f"""\
name: EdgeSpec
version: 1.0.0
schema: v1
models:
  - name: {MODEL}
    provider: openai
    model: {MODEL}
    apiBase: {url}/v1
    apiKey: none
    roles: [chat]
    capabilities: [tool_use]
    defaultCompletionOptions:
      contextLength: {_CONTEXT}
"""
    return {".continue/config.yaml": text}


def _webui_environment(url: str) -> Mapping[str, str]:
    return {
        **_WEBUI,
        "ENABLE_OLLAMA_API": "False",
        "OPENAI_API_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": "none",
        "RAG_EMBEDDING_ENGINE": "openai",
        "RAG_OPENAI_API_BASE_URL": f"{url}/v1",
        "RAG_OPENAI_API_KEY": "none",
    }


def _webui_ollama_environment(url: str) -> Mapping[str, str]:
    return {
        **_WEBUI,
        "ENABLE_OPENAI_API": "False",
        "OLLAMA_BASE_URL": url,
        "RAG_EMBEDDING_ENGINE": "ollama",
        "RAG_OLLAMA_BASE_URL": url,
    }


def _resuming(flag: str, *rest: str, path: Sequence[str] = ()) -> Callable[[str, bool], list[str]]:
    """Arguments of a program that continues its latest conversation with a flag, behind its path."""
    return lambda question, resumes: [*path, *([flag] if resumes else []), *rest, question]


def _python(script: Path) -> Callable[[str, bool], list[str]]:
    """Arguments of Python that run a script."""
    return _resuming("--continue", path=[str(script)])


CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
OLLAMA = "/api/chat"

PROGRAMS = {
    "claude": Program(
        "Claude Code",
        NpmPackage("@anthropic-ai/claude-code", "claude"),
        MESSAGES,
        _resuming("--continue", "--allowedTools=Read", "-p"),
        environment=_claude_environment,
    ),
    "codex": Program("Codex", NpmPackage("@openai/codex", "codex"), RESPONSES, _codex, files=_codex_files),
    "opencode": Program(
        "opencode",
        NpmPackage("opencode-ai", "opencode"),
        CHAT,
        lambda question, resumes: ["run", *(["--continue"] if resumes else []), question],
        environment=lambda _url: {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"},
        files=_opencode_files,
    ),
    "qwen-code": Program(
        "qwen-code",
        NpmPackage("@qwen-code/qwen-code", "qwen"),
        CHAT,
        _resuming("--continue", "--yolo", "--auth-type", "openai", "-p"),
        environment=_openai_environment,
    ),
    "pi": Program(
        "pi",
        NpmPackage("@mariozechner/pi-coding-agent", "pi"),
        CHAT,
        _resuming("--continue", "--offline", "--provider", "edgespec", "--model", MODEL, "-p"),
        files=_pi_files,
    ),
    "cn": Program(
        "Continue's cn",
        NpmPackage("@continuedev/cli", "cn"),
        CHAT,
        _resuming("--resume", "--auto", "--config", "../home/.continue/config.yaml", "-p"),
        environment=lambda _url: {"CONTINUE_TELEMETRY_ENABLED": "0"},
        files=_continue_files,
    ),
    "cline": Program(
        "cline",
        NpmPackage("cline", "cline"),
        CHAT,
        lambda question, _resumes: ["--auto-approve", "true", question],
        files=_cline_files,
    ),
    "open-webui": Program("Open WebUI", _WEBUI_PACKAGE, CHAT, _python(_PAGE), environment=_webui_environment),
    "open-webui-ollama": Program(
        "Open WebUI, Ollama API",
        _WEBUI_PACKAGE,
        OLLAMA,
        _python(_PAGE),
        environment=_webui_ollama_environment,
    ),
    "ai-sdk": Program(
        "Vercel's AI SDK",
        NpmPackage("ai", _LIBRARIES / "with_ai_sdk.mjs", also=["@ai-sdk/openai", "zod"]),
        RESPONSES,
        _resuming("--continue"),
        environment=_openai_environment,
    ),
    "openai-agents": Program(
        "openai-agents",
        PythonPackage("openai-agents", _PYTHONS),
        RESPONSES,
        _python(_LIBRARIES / "with_openai_agents.py"),
        environment=_openai_environment,
    ),
    "outlines": Program(
        "outlines, vLLM mode",
        PythonPackage("outlines", _PYTHONS, also=["openai"]),
        CHAT,
        _python(_LIBRARIES / "with_outlines.py"),
        by_form="guided forms",
        environment=_openai_environment,
    ),
}
