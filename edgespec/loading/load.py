"""From names and wishes to an engine that is ready."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from platformdirs import user_cache_path

from edgespec.costs.pass_time import Costs
from edgespec.engine.engine import Engine
from edgespec.engine.target import Target
from edgespec.errors import BackendError, MemoryLimitError, UsageError
from edgespec.generation.result import MemoryUse
from edgespec.kernels.kept import known_report, notes, tried_report
from edgespec.machine.cores import default_threads, thread_counts
from edgespec.machine.probe import available_memory
from edgespec.measure.initial_costs import initial_costs
from edgespec.measure.threads import choose_threads, known_threads
from edgespec.models.gguf import header as gguf
from edgespec.models.gguf.footprint import SPARE_CELLS, USUAL_NODES, Footprint, readable
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.hub import catalog
from edgespec.models.hub.drafter_choice import drafter_to_take
from edgespec.models.hub.registry import Registry
from edgespec.models.llama.build import current_build
from edgespec.models.llama.cache.identity import cache_identity
from edgespec.models.llama.cache.states import prompt_store
from edgespec.models.llama.pairing import differs
from edgespec.models.llama.prompt_pieces import LongPieces, outcomes_path
from edgespec.models.llama.row_rule import MOST_ROWS, SPARING, THOROUGH, RowRule, RowRuleStore
from edgespec.models.llama.runtime import AbortFlag, Context, DecodeAborted, Model
from edgespec.models.llama.trials.vetting import require_loadable
from edgespec.models.llama.vocabulary import Vocabulary
from edgespec.models.text.encoding import Encoder
from edgespec.models.text.template import ChatTemplate
from edgespec.offload.attention import keep_row_attention
from edgespec.offload.paging import PagedWeights, try_paging
from edgespec.offload.planning.budget import MemoryPlan, MemoryWish, bytes_needed, memory_room, plan_memory
from edgespec.offload.planning.needs import MOST_PROMPT_ROWS, ContextWish, Needs, measure_needs
from edgespec.offload.planning.stream import open_streamed_model
from edgespec.offload.ring import DamagedPack
from edgespec.profiles.store import Keys
from edgespec.profiles.table_file import TableFile
from edgespec.speculation.drafters.base import Drafter, NoDrafter
from edgespec.speculation.drafters.lookup import PromptLookup
from edgespec.speculation.drafters.proposers import Proposer
from edgespec.speculation.drafters.proposing import lookup_drafter
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.policies import TreePolicy, tree_policy
from edgespec.speculation.tree import MAX_LEAVES

Progress = Callable[[str, float], None]

DEFAULT_CONTEXT = 4096

_MODEL_DRAFT_DEPTH = 16
_NO_MODEL = {"auto", "none", "lookup"}


def load(
    model: str | os.PathLike[str] | None = None,
    *,
    draft: str | os.PathLike[str] = "auto",
    drafter: str | None = None,
    context: int = DEFAULT_CONTEXT,
    threads: int | None = None,
    memory: int | None = None,
    tree: str = "calibrated",
    tree_budget: int | None = None,
    tree_depth: int | None = None,
    tree_width: int | None = None,
    exact: bool | None = None,
    gpu_layers: int = 0,
    offload: str = "auto",
    pack: str = "auto",
    slots: int | None = None,
    prompt_cache: bool = False,
    on_progress: Progress | None = None,
) -> Engine:
    """Load a target and its drafter.

    Args:
        model: path of a GGUF file, a catalog name, or org/repo[:quant] on the Hub, which is downloaded if
            it is not here; None is the default model.
        draft: path or name of a small model, best one with the same vocabulary; "lookup" drafts from the
            text itself; "auto" takes the best that is here (registered, of the same family, made, or else
            the text itself); "none" decodes plainly.
        drafter: the kind: "model" or "lookup" alone, or "merged"; None merges what is there.
        context: most tokens of prompt and answer together.
        threads: CPU threads; None takes one for each physical core that this process may use, or one for each
            hardware thread where that was measured to be faster.
        memory: bytes EdgeSpec may use; None means what is available.
        tree: the policy by which trees grow; see speculation.policies.
        tree_budget: most nodes a pass; None sizes trees by measured cost.
        tree_depth: most drafted tokens on a path; None leaves it to the policy and to measured cost.
        tree_width: most nodes the drafter reads at a time; None as for the depth.
        exact: hold the kernels to one row rule, so that the text is the same bit for bit whatever the
            drafter and tree; None does so where it costs next to nothing. With True, rules that let the
            drafter take part in the text are refused.
        gpu_layers: layers for the GPU, where the llama.cpp build has one.
        offload: "none" keeps all weights in memory, "stream" reads those that do not fit from disk in
            every pass, "mmap" lets the system page them, "auto" keeps or streams them.
        pack: whether streamed weights are rearranged for this CPU in a file of their own: "auto" if
            the disk has room for it, "always" or "never".
        slots: layers in memory at a time of those that are streamed; None plans it.
        prompt_cache: keep what prompts were read as on disk, so that the same beginning is read once.
        on_progress: told (what is being done, fraction done).

    Raises:
        EdgeSpecError: its kinds say what is wrong: UsageError, ModelFileError, HubError,
            MemoryLimitError, BackendError.
    """
    wish = _Wish(
        context,
        default_threads() if threads is None else threads,
        threads is None,
        memory,
        tree,
        tree_budget,
        tree_depth,
        tree_width,
        exact,
        gpu_layers,
        offload,
        pack,
        slots,
    )
    wish.check()
    engine = _Loader(wish, on_progress or _ignore).load(
        catalog.find(model, on_progress), os.fspath(draft), drafter
    )
    if prompt_cache:
        engine.target.stores.append(prompt_store(engine.target.identity))
    return engine


@dataclass(frozen=True)
class _Wish:
    context: int
    threads: int
    threads_may_change: bool
    memory: int | None
    tree: str
    tree_budget: int | None
    tree_depth: int | None
    tree_width: int | None
    exact: bool | None
    gpu_layers: int
    offload: str
    pack: str
    slots: int | None

    @property
    def for_memory(self) -> MemoryWish:
        return MemoryWish(self.memory, self.offload, self.pack, self.gpu_layers, self.context, self.slots)

    def check(self) -> None:
        _require(16 <= self.context <= 10_000_000, "context", self.context, "from 16 to 10000000")
        _require(1 <= self.threads <= 1024, "threads", self.threads, "from 1 to 1024")
        _require(self.memory is None or self.memory > 0, "memory", self.memory, "above 0")
        budget = self.tree_budget
        _require(budget is None or 1 <= budget <= 4096, "tree budget", budget, "from 1 to 4096")
        for name, value in (("tree depth", self.tree_depth), ("tree width", self.tree_width)):
            _require(value is None or 1 <= value <= 4096, name, value, "from 1 to 4096")
        tree_policy(self.tree)
        _require(self.gpu_layers >= -1, "gpu layers", self.gpu_layers, "0 or more, or -1 for all")
        ways = ("auto", "stream", "mmap", "none")
        _require(self.offload in ways, "offload", self.offload, "auto, stream, mmap or none")
        _require(self.pack in ("auto", "always", "never"), "pack", self.pack, "auto, always or never")
        slots = self.slots
        _require(slots is None or 2 <= slots <= 4096, "number of slots", slots, "from 2 to 4096")
        if self.exact and budget is not None and budget > MOST_ROWS:
            raise UsageError(
                f"The tree budget is {budget}, and exact decoding allows {MOST_ROWS}.",
                f"Ask for --tree-budget {MOST_ROWS} or less, or for --no-exact.",
            )


class _Loader:
    """The steps of loading, with what they share."""

    def __init__(self, wish: _Wish, on_progress: Progress) -> None:
        self._wish = wish
        self._on_progress = on_progress
        self._abort = AbortFlag()
        self._notes: list[str] = []
        self._opened: list[Model | Context | ChatTemplate] = []
        self._needed = 0  # bytes
        self._threads = wish.threads
        self._plan: MemoryPlan

    def load(self, path: Path, draft: str, kind: str | None) -> Engine:
        start = time.perf_counter()
        try:
            return self._load(path, draft, kind, start)
        except BaseException as error:
            for opened in reversed(self._opened):
                opened.close()
            if isinstance(error, MemoryLimitError) and not error.hint:
                raise self._with_figures(error) from error
            raise

    def _with_figures(self, error: MemoryLimitError) -> MemoryLimitError:
        """What llama.cpp could not say: how much is needed, and how much there is."""
        return MemoryLimitError(
            f"{error.what} About {readable(self._needed)} are needed, and {readable(available_memory())} "
            "are there, unless the process is held to less.",
            "Ask for a smaller --context or --tree-budget, close other programs, or take a smaller model.",
        )

    def _load(self, path: Path, draft: str, kind: str | None, start: float) -> Engine:
        wish = self._wish
        _check_gpu(wish.gpu_layers)
        header = gguf.read_header(path)
        files = ModelFiles.of(header)
        require_loadable(files.headers)
        if known_report() is None:
            self._on_progress("Trying the processor's kernels (once)", 0.0)
        self._notes += notes(tried_report())
        draft_path = _draft_path(draft, kind, self._on_progress) or self._known_drafter(files, draft, kind)
        draft_header = gguf.read_header(draft_path) if draft_path else None
        if draft_header is not None:
            require_loadable(ModelFiles.of(draft_header).headers)
        needs = self._needs(files, draft_header)
        prints = needs.prints
        if draft_path is not None and prints[1].weights > prints[0].weights:
            self._notes.append(
                f"The drafter {draft_path.name} is larger than its target: that can hardly pay."
            )
        self._needed = bytes_needed(prints, needs.process)
        packs = user_cache_path("edgespec") / "packs"
        plan = self._plan = plan_memory(
            wish.for_memory, prints, files, packs, self._on_progress, needs.process
        )
        self._notes += plan.notes
        if plan.stream is not None:
            model = self._open_streamed(path, plan)
        else:
            paged = try_paging(files) if plan.paged else None
            # Rearranged weights are a copy in memory, which the system cannot page out.
            model = self._open_model(path, plan.memory_map, repack=not plan.paged, paged=paged)
        # A streamed pass costs the same for the rows that exactness adds.
        streamed = plan.stream is not None and not model.keeps_recurrent_state
        exact = streamed if wish.exact is None else wish.exact
        if model.keeps_recurrent_state:
            if exact:
                raise BackendError(
                    f"'{path.name}' keeps a running state, and exact decoding needs a cache of cells.",
                    "Use --no-exact.",
                )
            self._notes.append(
                "The target keeps a running state, which branches cannot share: drafting chains, not trees."
            )
        template = self._open_template(model)
        context = Context(
            model,
            n_cells=self._cells,
            n_rows=needs.rows,
            n_outputs=self._nodes,
            n_sequences=_sequences(self._nodes, model),
            n_threads=wish.threads,
            abort=self._abort,
        )
        self._opened.append(context)
        target = Target(model, context, self._row_rule(context, header.fingerprint) if exact else None)
        kernels = "plain" if self._plan.kernels_differ else "packed"
        target.identity = cache_identity(
            header, model, context=self._cells, rule=target.rule, gpu_layers=wish.gpu_layers, kernels=kernels
        )
        self._allow_long_pieces(target, header.fingerprint)
        self._choose_threads(target, header.fingerprint, drafts=draft != "none")
        limits = TreeLimits(self._nodes, depth=self._nodes, width=max(8, self._nodes // 8))
        guesses = "none" if draft == "none" else "lookup"
        policy = self._policy([header.fingerprint, draft_header.fingerprint if draft_header else guesses])
        drafter: Drafter
        if draft_path is not None:
            limits = replace(limits, depth=_MODEL_DRAFT_DEPTH)
            limits = policy.within(limits, wish.tree_depth, wish.tree_width)
            proposers = [] if kind == "model" else [PromptLookup()]
            drafter = self._open_drafter(draft_path, model.vocabulary, limits, proposers)
        else:
            limits = policy.within(limits, wish.tree_depth, wish.tree_width)
            drafter = NoDrafter() if draft == "none" else lookup_drafter()
            if draft == "auto":
                self._notes.append(
                    "No drafter is known for this target; drafting from the text itself. "
                    "'edgespec draft make' makes one."
                )
        keys = Keys.of(
            header.fingerprint,
            draft_header.fingerprint if draft_header else guesses,
            threads=context.n_threads,
            mode=f"{target.rule} {kernels} {wish.gpu_layers}",
        )
        return Engine(
            target,
            drafter,
            Encoder(model.vocabulary, template, wish.context),
            self._abort,
            context=wish.context,
            tree_budget=wish.tree_budget,
            limits=limits,
            policy=policy,
            costs=self._costs(target, drafter, limits.width, keys),
            keys=keys,
            notes=self._notes,
            warnings=plan.warnings,
            load_s=time.perf_counter() - start,
            memory=self._memory_use(prints, model),
            exact=bool(wish.exact),
        )

    def _allow_long_pieces(self, target: Target, fingerprint: str) -> None:
        """Let a streamed target's prompts be read in long pieces, if these turn out to be exact."""
        if target.rule is None or self._wish.gpu_layers or not target.model.weights.streamed_bytes:
            return
        if keep_row_attention(target.context):
            path = outcomes_path(user_cache_path("edgespec") / "rows", fingerprint, target.identity)
            target.pieces = LongPieces(target.rule, target.context.n_rows, path)

    def _choose_threads(self, target: Target, fingerprint: str, *, drafts: bool) -> None:
        """Compute with as many threads as are the fastest, which is measured where trees are sized too."""
        if not self._wish.threads_may_change or len(thread_counts()) < 2:
            return
        try:
            if drafts and self._wish.tree_budget is None:
                self._threads = choose_threads(target, fingerprint)
            else:
                self._threads = known_threads(fingerprint)
                target.context.set_threads(self._threads)
        except DecodeAborted:
            raise KeyboardInterrupt from None

    def _costs(self, target: Target, drafter: Drafter, width: int, keys: Keys) -> Costs | None:
        """What trees cost here; None where their size is not asked about."""
        if self._wish.tree_budget is not None or isinstance(drafter, NoDrafter):
            return None
        try:
            return initial_costs(target, drafter, width, keys, self._on_progress, notes=self._notes)
        except DecodeAborted:
            raise KeyboardInterrupt from None

    def _known_drafter(self, files: ModelFiles, draft: str, kind: str | None) -> Path | None:
        """With "auto": the best drafter that is here for the target, and a note that says which."""
        if draft != "auto" or kind == "lookup":
            return None
        self._notes += (
            f"The drafter {gone.path} of this target is not there any more. "
            f"'edgespec models remove {gone.path}' forgets it."
            for gone in Registry().missing(files.headers[0].fingerprint)
        )
        found = drafter_to_take(
            files.headers[0],
            files.tensor_bytes,
            budget=min(self._wish.memory or available_memory(), available_memory()),
            n_cells=self._cells,
            n_outputs=self._nodes,
        )
        if found is not None:
            self._notes.append(f"Drafting with {found.path.name}, {found.reason}.")
            return found.path
        if kind in ("model", "merged"):
            raise UsageError(
                "No drafter is known for this target.",
                "Name one with --draft PATH, or make one: edgespec draft make TARGET.",
            )
        return None

    def _policy(self, fingerprints: list[str]) -> TreePolicy:
        """The tree policy, with what it learned of this pair in earlier runs."""
        folder = user_cache_path("edgespec") / "acceptance"
        return tree_policy(self._wish.tree, TableFile.for_pair(folder, fingerprints))

    @property
    def _cells(self) -> int:
        return self._wish.context + SPARE_CELLS + (self._wish.tree_budget or 0)

    @property
    def _nodes(self) -> int:
        return max(self._wish.tree_budget or 0, USUAL_NODES)

    def _needs(self, files: ModelFiles, draft: gguf.GGUFHeader | None) -> Needs:
        """What target and drafter need, and the process."""
        wish = self._wish
        return measure_needs(
            files,
            ModelFiles.of(draft) if draft else None,
            ContextWish(
                self._cells, self._nodes, _sequences(self._nodes), wish.threads, wish.gpu_layers, wish.exact
            ),
            budget=memory_room(wish.memory),
            offload=wish.offload,
        )

    def _open_streamed(self, path: Path, plan: MemoryPlan) -> Model:
        assert plan.stream is not None
        gpu_layers = self._wish.gpu_layers
        try:
            model = open_streamed_model(path, plan.stream, gpu_layers, self._on_progress)
        except DamagedPack:  # and therefore removed: this makes a new one
            model = open_streamed_model(path, plan.stream_again(), gpu_layers, self._on_progress)
        self._opened.append(model)
        self._notes += plan.stream.notes
        return model

    def _memory_use(self, prints: list[Footprint], model: Model) -> MemoryUse:
        use = MemoryUse(budget_bytes=self._plan.budget, resident_bytes=sum(p.weights for p in prints))
        if self._plan.stream is not None and model.weights.resident_bytes:
            layers = model.weights.resident_bytes
            use.resident_bytes += self._plan.stream.other_bytes + layers - prints[0].weights
            use.streamed_bytes_per_pass = model.weights.streamed_bytes
        return use

    def _open_model(
        self, path: Path, memory_map: bool, *, repack: bool = True, paged: PagedWeights | None = None
    ) -> Model:
        self._on_progress(f"Loading {path.name}", 0.0)
        try:
            model = Model(
                path,
                gpu_layers=self._wish.gpu_layers,
                memory_map=memory_map,
                repack=repack,
                on_progress=lambda fraction: self._on_progress(f"Loading {path.name}", fraction),
                weights=paged,
            )
        except BaseException:
            if paged is not None:
                paged.close()
            raise
        self._opened.append(model)
        return model

    def _open_template(self, model: Model) -> ChatTemplate | None:
        source = model.chat_template
        if source is None:
            return None
        vocabulary = model.vocabulary
        bos, eos = (vocabulary.text(t).decode("utf-8", "replace") for t in (vocabulary.bos, vocabulary.eos))
        template = ChatTemplate(source, bos, eos)
        self._opened.append(template)
        template.start()  # its process gets ready while the context is set up
        return template

    def _open_drafter(
        self,
        path: Path,
        vocabulary: Vocabulary,
        limits: TreeLimits,
        proposers: Sequence[Proposer],
    ) -> Drafter:
        model = self._open_model(path, self._plan.memory_map)
        differ = differs(vocabulary, model.vocabulary)
        context = Context(
            model,
            n_cells=self._cells,
            n_rows=MOST_PROMPT_ROWS,
            n_outputs=limits.width,
            n_sequences=_sequences(self._nodes, model),
            n_threads=self._threads,
            abort=self._abort,
        )
        self._opened.append(context)
        if differ:
            from edgespec.drafters.retokenized import RetokenizedDrafter

            self._notes.append(
                f"The vocabularies of {path.name} and the target differ ({differ}): drafting by text, which "
                "is slower."
            )
            return RetokenizedDrafter(model, context, vocabulary)
        from edgespec.drafters.model import ModelDrafter

        return ModelDrafter(model, context, vocabulary.n_tokens, proposers)

    def _row_rule(self, context: Context, fingerprint: str) -> RowRule | None:
        self._on_progress("Finding the rule for exact decoding (once a model)", 0.0)
        kernels = "plain" if self._plan.kernels_differ else "packed"
        held = f"{kernels} gpu_layers={self._wish.gpu_layers}"
        search = SPARING if self._plan.stream is not None else THOROUGH
        rule = RowRuleStore(user_cache_path("edgespec") / "rows").get(fingerprint, held, context, search)
        if rule is None and self._wish.exact is None:
            self._notes.append("No row rule holds for this model here, so the text is not bit-exact.")
        elif rule is None:
            raise BackendError(
                "No row rule gives identical results with this model on this machine, so decoding cannot "
                "be exact here.",
                "Use --no-exact: the text may then differ at near-ties between tokens.",
            )
        return rule


def _draft_path(draft: str, kind: str | None, on_progress: Progress | None = None) -> Path | None:
    """The drafter's file, if it is a model.

    Raises:
        UsageError: kind and name contradict each other.
    """
    if kind not in (None, "model", "lookup", "merged"):
        raise UsageError(f"There is no drafter kind '{kind}'.", "The kinds are model, lookup and merged.")
    if kind == "lookup" and draft not in _NO_MODEL:
        raise UsageError("The lookup drafter needs no model.", "Leave out --draft, or --drafter lookup.")
    if kind in ("model", "merged") and draft in ("none", "lookup"):
        raise UsageError(f"The {kind} drafter needs a model.", "Name it with --draft PATH.")
    return None if draft in _NO_MODEL else catalog.find(draft, on_progress)


def _check_gpu(layers: int) -> None:
    """Refuse layers for a GPU that is not there; llama.cpp would compute them on the processor.

    Raises:
        UsageError: layers are asked for, and llama.cpp has nothing to give them to.
    """
    if layers == 0:
        return
    build = current_build()
    if not build.gpus:
        why = "finds no GPU here" if build.offloads else "is compiled for the processor alone"
        raise UsageError(
            f"The gpu layers are {layers}, and this llama.cpp build {why}.",
            "Leave out --gpu-layers, or see 'edgespec doctor' for how to compile llama.cpp for a GPU.",
        )


def _sequences(nodes: int, model: Model | None = None) -> int:
    """Sequence ids for trees of so many nodes; each id costs a row of logits, used or not."""
    if model is not None and model.keeps_recurrent_state:
        return 1
    return MAX_LEAVES if nodes > USUAL_NODES else USUAL_NODES


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise UsageError(f"The {name} is {value}.", f"It must be {wanted}.")


def _ignore(_what: str, _fraction: float) -> None:
    pass
