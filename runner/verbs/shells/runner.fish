# Completion of `runner` and `python -m runner`. Made by `runner completion fish`.
function __runner_command
    set -l found
    for word in (commandline -opc)
        set -a found $word
        if string match -qr '(^|/)runner$' -- $word
            if test (count $found) -eq 1; or test "$found[-2]" = -m
                string join \n -- $found
                return 0
            end
        end
    end
    return 1
end
function __runner_candidates
    set -l started (__runner_command)
    set -l found (RUNNER_LINE=(commandline -cp) $started completion candidates 2>/dev/null)
    if test (count $found) -gt 0
        string join \n -- $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c runner -f -a '(__runner_candidates)'
complete -c python -n __runner_command -f -a '(__runner_candidates)'
complete -c python3 -n __runner_command -f -a '(__runner_candidates)'
