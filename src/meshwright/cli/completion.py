"""`meshwright completion`: a script that lets a shell complete commands, options and catalog names.

The script is plain shell code with all words in it, so that completing starts no Python. It is written once, and again after an upgrade.
"""

from typing import Any

import typer

SHELLS = ("bash", "zsh", "fish")
INSTALL = {
    "bash": "meshwright completion bash > ~/.local/share/bash-completion/completions/meshwright",
    "zsh": "meshwright completion zsh > ~/.meshwright-completion && echo 'source ~/.meshwright-completion' >> ~/.zshrc",
    "fish": "meshwright completion fish > ~/.config/fish/completions/meshwright.fish",
}


def command(shell: str = typer.Argument("bash", help="bash, zsh or fish.")) -> None:
    """Print a script that completes commands, options and catalog names; its first line says where to put it."""
    from meshwright.errors import unknown

    if shell not in SHELLS:
        raise unknown("MW-CLI-005", "shell", shell, SHELLS, "meshwright completion {}")
    words = vocabulary()
    print(f"# {INSTALL[shell]}")
    print(fish_script(words) if shell == "fish" else bash_script(words, zsh=shell == "zsh"))


def vocabulary() -> dict[str, list[str]]:
    """The words that may follow: "" after `meshwright`, "plan" after `meshwright plan`, "config show" after its subcommand."""
    from meshwright.cli import COMMANDS, build
    from meshwright.describe import catalog
    from meshwright.describe.own_stack import OURS
    from meshwright.interop.frameworks import FRAMEWORKS, READABLE
    from meshwright.view.show.topics import TOPICS, options_of

    out = {"": [*COMMANDS, "--help", "--version"]}
    for name in COMMANDS:
        made: Any = typer.main.get_command(build(name))
        for path, inner in [(name, made), *((f"{name} {sub}", c) for sub, c in getattr(made, "commands", {}).items())]:
            flags = [flag for p in inner.params for flag in (*p.opts, *p.secondary_opts) if flag.startswith("--")]
            out[path] = [*getattr(inner, "commands", {}), *flags, "--help"]
    for topic in TOPICS:
        flags = [f"--{option.replace('_', '-')}" for option in sorted(options_of(topic) - {"names"})]
        out[f"show {topic}"] = [*flags, "--json", "--help"]
    out["show"] = [*TOPICS, "--json", "--help"]
    for name in ("plan", "estimate"):
        out[name] += catalog.names("models")
    out["migrate"] += ["auto", *READABLE]
    out["--for"] = [OURS, *FRAMEWORKS]
    out["--cluster"] = catalog.names("clusters")
    out["--stack"] = catalog.names("stacks")
    return out


def bash_script(words: dict[str, list[str]], zsh: bool = False) -> str:
    """A function for `complete`. zsh runs it through bashcompinit."""
    lines = {path: f"words='{' '.join(options)}' ;;" for path, options in words.items()}
    cases = "\n".join(f"        '{path}') {line}" for path, line in lines.items() if not path.startswith("--"))
    values = "\n".join(f"        {option}) {line}" for option, line in lines.items() if option.startswith("--"))
    start = "autoload -U +X compinit && compinit && autoload -U +X bashcompinit && bashcompinit\n" if zsh else ""
    return f"""{start}_meshwright() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" path='' words=''
    if [ "$COMP_CWORD" -gt 1 ]; then path="${{COMP_WORDS[1]}}"; fi
    if [ "$COMP_CWORD" -gt 2 ]; then
        case "${{COMP_WORDS[1]}} ${{COMP_WORDS[2]}}" in
        {"|".join(f"'{path}'" for path in words if " " in path)}) path="${{COMP_WORDS[1]}} ${{COMP_WORDS[2]}}" ;;
        esac
    fi
    case "$previous" in
{values}
        *) case "$path" in
{cases}
        esac ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -o bashdefault -F _meshwright meshwright"""


def fish_script(words: dict[str, list[str]]) -> str:
    """One line for each word, with the condition under which fish offers it."""
    commands = " ".join(word for word in words[""] if word[0] != "-")
    lines = [f"complete -c meshwright -n __fish_use_subcommand -a '{commands}'"]
    for path, options in words.items():
        parts = path.split()
        if not parts or path.startswith("--"):
            continue
        condition = " ; and ".join(f"__fish_seen_subcommand_from {part}" for part in parts)
        plain = " ".join(w for w in options if not w.startswith("-"))
        if plain:
            lines.append(f"complete -c meshwright -n '{condition}' -a '{plain}'")
        lines += [f"complete -c meshwright -n '{condition}' -l {w[2:]}" for w in options if w.startswith("--")]
    return "\n".join(lines)
