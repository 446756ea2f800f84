# Completion of `runner` and `python -m runner`, also in macOS's bash 3.2. Made by `runner completion bash`.
_runner_completion() {
    local word previous current prefix found
    local -a command
    COMPREPLY=()
    for word in "${COMP_WORDS[@]:0:COMP_CWORD}"; do
        command+=("$word")
        [[ "$word" == runner || "$word" == */runner ]] && break
        previous="$word"
    done
    [[ "$word" == runner || "$word" == */runner ]] || return 0
    [[ ${#command[@]} -eq 1 || "$previous" == -m ]] || return 0
    current="${COMP_LINE:0:COMP_POINT}"
    current="${current##*[[:space:]]}"
    prefix="${current%"${current##*[=:]}"}" # readline completes what comes after a = or :
    while IFS=$'\t' read -r found _; do
        [[ "$found" == "$current"* ]] && COMPREPLY+=("${found#"$prefix"}")
    done < <(RUNNER_LINE="${COMP_LINE:0:COMP_POINT}" "${command[@]}" completion candidates 2>/dev/null)
    if [[ ${#COMPREPLY[@]} -gt 0 ]] && type compopt &>/dev/null; then
        compopt -o nospace 2>/dev/null
        [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" != *[=.] ]] && COMPREPLY[0]+=" "
    fi
    return 0
}
complete -o default -F _runner_completion runner python python3
