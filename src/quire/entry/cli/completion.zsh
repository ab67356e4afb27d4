#compdef quire
_quire() {
    local -a entries
    local -x current="$words[CURRENT]" before="${words[2,CURRENT-1]}"
    entries=("${(@f)$(awk '@AWK@' <<< "$_quire_rows" | sed 's/:/\\:/g; s/	$//; s/	/:/')}")
    [[ -n "$entries" ]] && _describe -o argument entries || _files
}
_quire_rows='@ROWS@'
(( $+functions[compdef] )) && compdef _quire quire
