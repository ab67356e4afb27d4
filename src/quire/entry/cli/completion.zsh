#compdef quire
_quire() {
    local -a entries
    local -x current="$words[CURRENT]" before="${words[2,CURRENT-1]}"
    entries=("${(@f)$(awk '@AWK@' <<< "$_quire_rows" | sed 's/:/\\:/g; s/	$//; s/	/:/')}")
    [[ -n "$entries" ]] && _describe argument entries || _files
}
_quire_rows='@ROWS@'
if [[ "$funcstack[1]" == _quire ]]; then  # zsh has loaded this file as a function, at the first completion
    _quire "$@"
elif (( $+functions[compdef] )); then
    compdef _quire quire
fi
