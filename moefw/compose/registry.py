"""Plugin registry: finds, loads and caches plugins. Imports only the plugins that a spec names, in its order."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import deepcopy
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

import attrs
import pluggy
from attrs import frozen
from packaging.specifiers import InvalidSpecifier, SpecifierSet

import moefw
from moefw.compose.built import require_method, require_part
from moefw.compose.built_in import built_in
from moefw.compose.spec.sections import inner_plugins
from moefw.compose.spec.structure import require_readable
from moefw.compose.torch_settings import unchanged
from moefw.compose.trust import ALLOWED, OURS, allowed
from moefw.core import hooks
from moefw.core.errors import MoefwError, PluginError, Problem, closest, nearest
from moefw.core.kinds import KINDS
from moefw.core.plugin import Plugin
from moefw.core.probes import Probe

GROUP = "moefw"
"""The entry-point group. The name of an entry point is the name of the part that it declares."""

_log = logging.getLogger(__name__)
OBSERVER: Final = "observer"
"""What ``run.observers`` names, beside the kinds of parts."""


@frozen
class RegisteredPlugin:
    """A declared plugin, the name of its kind, and its distribution."""

    kind: str
    name: str
    declaration: type[Plugin]
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"plugin {self.name!r} (distribution {self.distribution} {self.version})"


@frozen
class Offer:
    """A built-in part, or an installed entry point, not imported yet. Its name is that of a part or of an observer."""

    entry: EntryPoint
    distribution: str
    version: str


class Registry:
    """The plugins of one process. ``extra`` adds modules that have no entry point, for tests and notebooks.

    ``warnings``: what the authors of loaded plugins should change. ``probes``: those of loaded plugins.
    """

    def __init__(self, extra: Iterable[Any] = ()) -> None:
        self.warnings: list[str] = []
        self.probes: list[Probe] = []
        self._manager = pluggy.PluginManager(GROUP)
        self._manager.add_hookspecs(hooks)
        self._parts: dict[tuple[str, str], RegisteredPlugin] = {}
        self._owners: dict[int, tuple[str, str]] = {}
        self._silenced: set[int] = set()
        self._loaded: set[str] = set()
        self._offers: dict[str, list[Offer]] = {}
        self._barred: dict[str, Offer] = {}
        self._observers: dict[str, Offer] = {}
        self._observing: set[str] = set()
        may_load = allowed(os.environ)
        known_as: dict[Any, tuple[str, str]] = {None: ("?", "?")}
        for name, module in built_in().items():
            self._offers[name] = [Offer(EntryPoint(name, module, GROUP), OURS, moefw.__version__)]
        for entry in entry_points(group=GROUP):
            if entry.dist and entry.dist not in known_as:  # both parse the whole metadata
                known_as[entry.dist] = entry.dist.name, entry.dist.version
            offer = Offer(entry, *known_as[entry.dist])
            if not may_load(offer.distribution):
                self._barred[entry.name] = offer
            elif not any(offer.distribution == known.distribution for known in self._offers.get(entry.name, [])):
                self._offers.setdefault(entry.name, []).append(offer)
        for module in extra:
            self.register(module, "this process", "0")

    @property
    def barred(self) -> list[Offer]:
        """The installed entry points that are not allowed, by name."""
        return [offer for _, offer in sorted(self._barred.items())]

    @property
    def observers(self) -> list[Offer]:
        """The loaded entry points that declare no part, but observe or check, by name."""
        return [offer for _, offer in sorted(self._observers.items())]

    @property
    def names(self) -> tuple[str, ...]:
        """The names that can be loaded, whether or not their plugins work."""
        return tuple(sorted({*self._offers, *(name for _, name in self._parts)}))

    def names_of(self, kind: str | None) -> list[str]:
        """Names of a kind, for an error, with those of others' plugins that are not loaded and may be of any kind.

        ``kind`` None: names of all kinds. ``OBSERVER``: those of others' plugins alone, as none of ours observes.
        """
        if kind is None:
            return [*self.names]
        ours = [name for name, offers in self._offers.items() if offers[0].distribution == OURS]
        for name in ours if kind != OBSERVER else ():
            with suppress(PluginError):  # of a name that another distribution brings, too
                self.load(name)
        unseen = self._offers.keys() - self._loaded - set(ours)
        of_kind = self._observing if kind == OBSERVER else {name for of, name in self._parts if of == kind}
        return sorted({*of_kind, *unseen})

    def load(self, name: str, kind: str | None = None) -> None:
        """Import and register the plugin called ``name``. Raises PluginError, which leaves other plugins intact.

        ``kind``: that of the names which an error suggests, as in :meth:`names_of`.
        """
        if name in self._loaded:
            return
        offers = self._offers.get(name, [])
        if not offers:
            if any(known == name for _, known in self._parts):
                return
            if name in self._barred:
                offer = self._barred[name]
                what = f"plugin {name!r} is of distribution {offer.distribution} {offer.version}, which is not allowed."
                raise PluginError(what, f"Name it in {ALLOWED} if you trust its code.")
            raise PluginError(f"no plugin is called {name!r}.", self._likely(name, kind))
        if len(offers) > 1:
            rivals = " and ".join(f"{offer.distribution} {offer.version}" for offer in offers)
            what = f"two distributions bring a plugin called {name!r}: {rivals}."
            raise PluginError(what, _way_out(name, [offer.distribution for offer in offers]))
        (offer,) = offers
        who = f"plugin {name!r} (distribution {offer.distribution} {offer.version})"
        what = f"{who} fails to import"
        fix = f"Mend or uninstall {offer.distribution}."
        torch_was_there = "torch" in sys.modules
        began = time.perf_counter()
        try:
            with _unchanged_by(offer.distribution, what):
                module = offer.entry.load()
        except PluginError:
            raise
        except (Exception, SystemExit) as error:
            renamed = f" {hooks.UPGRADE_PAGE} lists what was renamed." if _lacks_a_name_of_ours(error) else ""
            raise PluginError(f"{what}: {type(error).__name__}: {error}.", f"{fix}{renamed}") from error
        if not torch_was_there and "torch" in sys.modules:
            seconds = time.perf_counter() - began
            self.warnings.append(f"{who} takes {seconds:.1f} s to declare, as it imports torch. Import it in build().")
        if offer.distribution != OURS and not hasattr(module, "moefw_api"):
            fix = f'Write moefw_api = ">={hooks.API_VERSION}" in {module.__name__}.'
            self.warnings.append(f"{who} does not state the hook API that it is written for. {fix}")
        self.register(module, offer.distribution, offer.version, promised=name)
        if self._only_observes(module):
            self._observers[name] = offer
        if self._observes(module):
            self._observing.add(name)
        self._loaded.add(name)

    def _likely(self, name: str, kind: str | None) -> str:
        """Likely meaning of an unknown name: a misspelt name, or that of a package that is not installed."""
        names = self.names_of(kind)
        known = nearest(name, names)
        if closest(name, names) or not re.fullmatch(r"[a-z][\w-]*", name):
            return known
        return f"If a package brings it (moefw-{name}, say), that is not installed here. {known}".rstrip()

    def register(self, module: Any, distribution: str, version: str, *, promised: str | None = None) -> None:
        """Check and register one plugin module.

        With ``promised``, it must declare a part of that name, or declare no part and observe or check.

        Raises PluginError for an invalid module, and leaves the registry unchanged.
        """
        if id(module) in self._owners:
            if not self._only_observes(module):
                _keep_promise(promised, self._parts.values(), distribution, version)
            return
        label = f"{getattr(module, '__name__', module)!r} (distribution {distribution} {version})"
        _check_api(module, label)
        try:
            self._manager.register(module, name=f"{distribution}:{id(module)}")
            self._manager.check_pending()
            self._owners[id(module)] = (distribution, version)
            declared = list(self._declared(module, distribution, version, label))
            probes = list(self._probes_of(module, distribution, label))
            if not self._only_observes(module):
                _keep_promise(promised, declared, distribution, version)
        except (pluggy.PluginValidationError, PluginError) as error:
            if self._manager.is_registered(module):  # pluggy may have refused it
                self._manager.unregister(module)
            self._owners.pop(id(module), None)
            if isinstance(error, PluginError):
                raise
            specs = [name for name in vars(hooks) if name.startswith("moefw_")]
            marked = (name for name, value in vars(module).items() if hasattr(value, "moefw_impl"))
            typo = next((name for name in marked if name not in specs), None)
            hint = nearest(typo, specs) if typo else "See moefw/core/hooks.py."
            raise PluginError(
                f"plugin {label} breaks the hook interface: {' '.join(str(error).split())}.", hint
            ) from error
        self._parts |= {(part.kind, part.name): part for part in declared}
        self.probes += probes
        if self._observes(module):
            self._observing |= {part.name for part in declared}

    def _declared(self, module: Any, distribution: str, version: str, label: str) -> Iterator[RegisteredPlugin]:
        for kind in KINDS.values():
            for declarations in self._returned(kind.hook, module, distribution, label):
                for declaration in declarations:
                    if not (isinstance(declaration, type) and issubclass(declaration, kind.base)):
                        what = f"plugin {label} returns {declaration!r} from {kind.hook}"
                        raise PluginError(f"{what}, which wants {kind.base.__name__} classes.")
                    name = _checked_name(declaration, label)
                    rival: RegisteredPlugin | Offer | None = self._parts.get((kind.name, name))
                    announced = (offer for offer in self._offers.get(name, ()) if offer.distribution != distribution)
                    rival = rival or next(announced, None)
                    if rival:
                        rivals = f"one of {rival.distribution} {rival.version}, one of {distribution} {version}"
                        what = f"two plugins are called {name!r} in {kind.hook}: {rivals}."
                        raise PluginError(what, _way_out(name, [rival.distribution, distribution]))
                    yield RegisteredPlugin(kind.name, name, declaration, distribution, version)

    def _probes_of(self, module: Any, distribution: str, label: str) -> Iterator[Probe]:
        for probes in self._returned("moefw_probes", module, distribution, label):
            for probe in probes:
                if not isinstance(probe, Probe):
                    what = f"plugin {label} returns {probe!r} from moefw_probes, which wants moefw.Probe."
                    raise PluginError(what, f"Mend or uninstall {distribution}.")
                yield probe

    def _returned(self, hook: str, module: Any, distribution: str, label: str) -> Iterator[list[Any]]:
        """Yield what each implementation of a hook in a module returns. Raises PluginError if one raises."""
        for implementation in self._implementations(hook, of=module):
            try:
                returned = list(implementation())
            except Exception as error:
                what = f"plugin {label} raises in {hook}: {type(error).__name__}: {error}."
                raise PluginError(what, f"Mend or uninstall {distribution}.") from error
            yield returned

    def _only_observes(self, module: Any) -> bool:
        """Whether a module implements hooks, and no declaring one."""
        callers = self._manager.get_hookcallers(module) or []
        return bool(callers) and not any(caller.name in hooks.DECLARING for caller in callers)

    def _observes(self, module: Any) -> bool:
        """Whether a module implements a hook of observers. It may declare parts, too."""
        return any(caller.name in hooks.OBSERVING for caller in self._manager.get_hookcallers(module) or [])

    def _implementations(self, hook: str, of: Any) -> Iterator[Callable[..., Any]]:
        for implementation in getattr(self._manager.hook, hook).get_hookimpls():
            if implementation.plugin is of:
                yield implementation.function

    def load_observer(self, name: str) -> None:
        """Load the plugin called ``name``. Raises PluginError if it observes nothing."""
        self.load(name, OBSERVER)
        if name in self._observing:
            return
        *first, last = hooks.OBSERVING
        what = f"{name!r} observes nothing: an observer implements {', '.join(first)} or {last}."
        names = self.names_of(OBSERVER)
        installed = f"Installed: {', '.join(names)}." if names else "No observer is installed."
        raise PluginError(what, f"Take it out. {installed}")

    def get(self, kind: str, name: str) -> RegisteredPlugin:
        """Part of a kind, whose plugin is loaded if needed. Raises PluginError with the nearest known name."""
        self.load(name, kind)
        part = self._parts.get((kind, name))
        if part is None and name in self._observers:
            raise PluginError(f"{name!r} is no part: it observes a run.", "Name it in run.observers.")
        if part is None:
            kinds = ", ".join(KINDS[other].plural for other, known in self._parts if known == name)
            what = f"{name!r} is none of the {KINDS[kind].plural}; it is one of the {kinds}."
            raise PluginError(what, nearest(name, self.names_of(kind)))
        return part

    def origin(self, plugin: Plugin | type[Plugin]) -> RegisteredPlugin:
        """Registered plugin that is ``plugin``, or of which it is an instance."""
        declaration = plugin if isinstance(plugin, type) else type(plugin)
        return next(part for part in self._parts.values() if part.declaration is declaration)

    def accountable(self, plugin: Plugin) -> RegisteredPlugin:
        """Origin of a plugin; of one of ours that calls others, that of the first which is not ours."""
        origins = [self.origin(caller_or_called) for caller_or_called in (plugin, *inner_plugins(plugin))]
        return next((origin for origin in origins if origin.distribution != OURS), origins[0])

    @contextmanager
    def calling(self, plugin: Plugin, method: str) -> Iterator[None]:
        """Enter a call of a plugin before training.

        Raises PluginError if the call changes settings of torch that all share, or fails to import a module.
        """
        part = self.accountable(plugin)
        try:
            with _unchanged_by(part.distribution, f"{part} breaks its contract in {method}"):
                yield
        except (ImportError, SyntaxError) as error:
            what = f"{part} fails to import a module in {method}: {type(error).__name__}: {error}."
            raise PluginError(what, f"Install that module, or mend or uninstall {part.distribution}.") from error

    def built(self, plugin: Plugin, *arguments: Any, by: str = "build") -> Any:
        """Part that a plugin builds, given the ``arguments`` of its method ``by``.

        Raises PluginError if the plugin has no such method, or returns what is no part of its kind: see ``calling``.
        """
        who = self.origin(plugin)
        require_method(plugin, who, by)
        with self.calling(plugin, f"{by}()"):
            part = getattr(plugin, by)(*arguments)
        require_part(plugin, who, by, part)
        return part

    def load_all(self) -> list[Problem]:
        """Load every installed plugin and return the problems of those that fail."""
        problems: list[Problem] = []
        for name in sorted(self._offers):
            try:
                self.load(name)
            except PluginError as error:
                problems += error.problems
        return problems

    def parts(self) -> list[RegisteredPlugin]:
        """Loaded parts by kind and name."""
        order = list(KINDS)
        return sorted(self._parts.values(), key=lambda part: (order.index(part.kind), part.name))

    def problems(self, assembly: Any) -> list[Problem]:
        """Problems that ``moefw_check`` of each loaded plugin finds. Raises PluginError if one raises anything else."""
        problems: list[Problem] = []
        for implementation in reversed(self._manager.hook.moefw_check.get_hookimpls()):
            distribution, version = self._owners[id(implementation.plugin)]
            who = f"a plugin of {distribution} {version} breaks its contract in moefw_check"
            try:
                answer: Any = implementation.function(*(assembly for _ in implementation.argnames))
                answer = list(answer)
                wrong = [item for item in answer if not isinstance(item, Problem)]
                if wrong:
                    raise TypeError(f"{wrong[0]!r} is not a Problem")
                problems += answer
            except MoefwError:
                raise
            except Exception as error:
                what = f"{who}: {type(error).__name__}: {' '.join(str(error).split())}."
                raise PluginError(what, f"Mend or uninstall {distribution}.") from error
        return problems

    def notify(self, hook: str, *, place: str, **arguments: Any) -> None:
        """Call an observer hook, each observer with a copy of the arguments.

        An observer that raises is logged once, with ``place``, and not called again. The run continues.
        """
        for implementation in getattr(self._manager.hook, hook).get_hookimpls():
            if id(implementation.plugin) in self._silenced:
                continue
            own_arguments = deepcopy({name: arguments[name] for name in implementation.argnames})
            try:
                implementation.function(**own_arguments)
            except (Exception, SystemExit) as error:
                self._silenced.add(id(implementation.plugin))
                distribution, version = self._owners[id(implementation.plugin)]
                who = f"an observer of {distribution} {version} fails in {place} and is not called again"
                _log.error("%s: %s", who, error, exc_info=True)


def _unchanged_by(distribution: str, who: str) -> AbstractContextManager[None]:
    """Enter code of a distribution. Raises PluginError, starting with ``who``, if it changes settings of torch."""
    if distribution == OURS:
        return nullcontext()
    return unchanged(lambda what: PluginError(f"{who}: {what}", f"Mend or uninstall {distribution}."))


def _way_out(name: str, distributions: Sequence[str]) -> str:
    """Fix for two plugins with one name. A built-in plugin stays."""
    if OURS not in distributions:
        return "Uninstall one of them."
    others = " and ".join(each for each in distributions if each != OURS)
    return f"{name!r} is built in: uninstall {others}, or give its plugin another name."


def _keep_promise(promised: str | None, declared: Iterable[RegisteredPlugin], distribution: str, version: str) -> None:
    names = {part.name for part in declared if part.distribution == distribution}
    if promised is not None and promised not in names:
        what = (
            f"distribution {distribution} {version} announces a plugin {promised!r} and declares no part of that name"
        )
        hint = f"It declares {', '.join(sorted(names))}." if names else "Is @moefw.hookimpl on its hooks?"
        raise PluginError(f"{what}.", f"{hint} Mend or uninstall {distribution}.")


def _checked_name(declaration: type[Plugin], label: str) -> str:
    """Name of a declaration. Raises PluginError if it has none, or its options cannot be read."""
    name = getattr(declaration, "name", None)
    if not isinstance(name, str):
        raise PluginError(f"plugin {label}: {declaration.__name__} has no name.", 'Write name: ClassVar[str] = "...".')
    if "__attrs_attrs__" not in vars(declaration):
        raise PluginError(
            f"plugin {label}: {declaration.__name__} is not an attrs class.", "Decorate it with @attrs.frozen."
        )
    try:
        attrs.resolve_types(declaration)
    except Exception as error:
        what = f"plugin {label}: an annotation of {declaration.__name__} does not resolve: {error}."
        raise PluginError(what, "Import the name at module level.") from error
    for field in (field for field in attrs.fields(declaration) if field.init):
        try:
            require_readable(field.type)
        except PluginError as error:
            (problem,) = error.problems
            what = f"plugin {label}: {field.name!r} of {declaration.__name__}: {problem.what}"
            raise PluginError(what, problem.fix) from error
    return name


def _check_api(module: Any, label: str) -> None:
    versions = getattr(module, "moefw_api", None)
    if versions is None:
        return
    try:
        written_for = SpecifierSet(versions)
    except (InvalidSpecifier, TypeError) as error:
        raise PluginError(
            f"plugin {label} states moefw_api = {versions!r}, which is no version range.", "For example '>=3,<4'."
        ) from error
    if not written_for.contains(hooks.API_VERSION):
        what = f"plugin {label} is written for hook API {versions}; this moefw has {hooks.API_VERSION}."
        raise PluginError(what, f"Install a version of it, or of moefw, that fits.{_upgrade(written_for)}")


def _lacks_a_name_of_ours(error: BaseException) -> bool:
    """Whether an import failed at a module or a name of moefw, as that of a plugin for another version may."""
    return isinstance(error, ImportError | AttributeError) and re.search(r"'moefw['.]", str(error)) is not None


def _upgrade(written_for: SpecifierSet) -> str:
    """Sentence that names the sections for the author of a plugin for an earlier version; else empty."""
    current = int(hooks.API_VERSION.partition(".")[0])
    earlier = [version for version in range(1, current) if written_for.contains(f"{version}.0")]
    if not earlier:
        return ""
    sections = (f"'From {version} to {version + 1}'" for version in range(earlier[-1], current))
    return f" {hooks.UPGRADE_PAGE}, {', '.join(sections)}, says what its author changes."
