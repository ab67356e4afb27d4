_quire() {
    local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" path="" words="" flags="" word
    case "$cur" in =) cur="" ;; esac
    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        case "$path $word" in
@STEPS@
        esac
    done
    case "$path $prev" in
@CHOICES@
        *) case "$path" in
@WORDS@
        esac ;;
    esac
    case "$cur" in -*) words="$flags" ;; esac
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
    case "$cur" in -*) ;; *) COMPREPLY+=($(compgen -d -- "$cur")) ;; esac
}
complete -o filenames -F _quire quire
