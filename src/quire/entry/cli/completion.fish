set -g _quire_rows '@ROWS@'
function _quire
    set -l words (commandline -opc)
    set -lx current (commandline -ct)
    set -lx before (string join ' ' -- $words[2..-1])
    printf '%s\n' $_quire_rows | awk '@AWK@'
end
complete -c quire -a '(_quire)'
