# bash completion of agentgrpo, written by `agentgrpo completion bash`.
# <words>
_agentgrpo() {
  local line=${COMP_LINE:0:COMP_POINT} IFS=$' \t\n' reply name rest word place
  word=${line##*[[:space:]]} # whole: COMP_WORDS has `key=value` in three
  local before=${COMP_WORDS[COMP_CWORD - 1]} command=${COMP_WORDS[1]}
  local -n words=_agentgrpo_commands
  COMPREPLY=()
  if ((COMP_CWORD > 1)); then
    [[ " ${_agentgrpo_commands[*]} " == *" $command "* && $command != -* ]] || return 0
    local -n words=_agentgrpo_words_$command place=_agentgrpo_place_$command values=_agentgrpo_value_$command
    [[ " ${values[*]} " == *" $before "* ]] && return 0 # the shell's own: a file
  fi
  local -A found=()
  for name in "${words[@]}"; do
    [[ $name == "$word"* && ($name != -* || $word == -*) ]] || continue
    [[ $name == *= && $name == "$word" ]] && continue # its values are offered
    rest=${name:${#word}}
    if [[ $name == *=* && $rest == *[.=]?* ]]; then # a part of a key at a time
      rest=${rest%%[.=]*}
      name=$word$rest${name:${#word}+${#rest}:1}
    fi
    found[$name]=1
  done
  if [[ $word != -* && $place == runs ]]; then
    while read -r name; do
      if [[ -f $name/run.json ]]; then found[$name]=1; else found[$name/]=1; fi
    done < <(compgen -d -- "$word")
  elif [[ $word != -* && $place == config ]] && ((COMP_CWORD == 2)); then
    while read -r name; do found[$name]=1; done < <(compgen -f -X '!*.toml' -- "$word")
    while read -r name; do found[$name/]=1; done < <(compgen -d -- "$word")
  fi
  for reply in "${!found[@]}"; do
    [[ $reply == *[.=/] ]] && compopt -o nospace 2> /dev/null
    [[ $word == *=* && $COMP_WORDBREAKS == *=* ]] && reply=${reply#"${word%"${word##*=}"}"}
    COMPREPLY+=("$reply")
  done
}
complete -o default -F _agentgrpo agentgrpo
