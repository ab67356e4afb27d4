#compdef quire
_quire() {
    local -a entries
    if (( CURRENT == 2 )); then
        entries=(@TOP@)
        _describe command entries
        return
    fi
    case "$words[2]${${(M)words[2]:#bench}:+ $words[3]}" in
@CASES@
    esac
    _describe -o argument entries || _files
}
(( $+functions[compdef] )) && compdef _quire quire
