for i in $(seq 1 100); do
 a=($(head -1 /proc/stat)); sleep 1.5; b=($(head -1 /proc/stat))
 idle=$((b[4]-a[4])); tot=0; for k in 1 2 3 4 5 6 7; do tot=$((tot+b[k]-a[k])); done
 if [ $((100*idle/tot)) -gt 92 ]; then echo "idle $((100*idle/tot))%"; exit 0; fi
done; echo busy
