# Completion of `runner` and `python -m runner`. Made by `runner completion zsh`.
_runner_completion() {
    local word text
    local -a command begun whole shown_begun shown_whole
    for word in "${(@)words[1,CURRENT-1]}"; do
        command+=("$word")
        [[ "$word" == (runner|*/runner) ]] && break
    done
    if [[ "$word" != (runner|*/runner) ]] || { (( ${#command} > 1 )) && [[ "${command[-2]}" != -m ]] }; then
        (( $+functions[_python] )) && _python "$@" || _files
        return
    fi
    while IFS=$'\t' read -r word text; do
        if [[ "$word" == *[=.] ]]; then
            begun+=("$word")
            shown_begun+=("$word${text:+  $text}")
        else
            whole+=("$word")
            shown_whole+=("$word${text:+  $text}")
        fi
    done < <(RUNNER_LINE="${(j: :)words[1,CURRENT-1]} $PREFIX" "${command[@]}" completion candidates 2>/dev/null)
    if (( ${#begun} + ${#whole} == 0 )); then
        _files
        return
    fi
    (( ${#begun} )) && compadd -S '' -l -d shown_begun -a begun
    (( ${#whole} )) && compadd -l -d shown_whole -a whole
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _runner_completion runner python python3
