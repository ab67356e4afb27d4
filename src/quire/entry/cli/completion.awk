# Prints what may follow the words "before" of a line when "current" has been typed of the next: word, tab, help.
BEGIN { FS = "\t"; count = split(ENVIRON["before"], given, " ") }
{ command[NR] = $1; flag[NR] = $2; word[NR] = $3; help[NR] = $4; known[$1] }
END {
    for (i = 1; i <= count; i++)
        if ((at == "" ? given[i] : at " " given[i]) in known) at = at == "" ? given[i] : at " " given[i]
    if (count) after(given[count])
    if (!found) after("")
}
function after(last, i) {
    for (i = 1; i <= NR; i++)
        if (command[i] == at && flag[i] == last && (last != "" || (word[i] ~ /^-/) == (ENVIRON["current"] ~ /^-/))) {
            print word[i] "\t" help[i]
            found = 1
        }
}
