_quire() {
    local current="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[*]:1:COMP_CWORD-1}"
    case "$current" in =) current="" ;; esac
    COMPREPLY=($(compgen -W "$(export current before; awk '@AWK@' <<< "$_quire_rows" | cut -f 1)" -- "$current"))
    case "$current" in -*) ;; *) COMPREPLY+=($(compgen -d -- "$current")) ;; esac
}
_quire_rows='@ROWS@'
complete -o filenames -F _quire quire
